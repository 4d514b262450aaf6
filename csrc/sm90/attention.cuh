// Attention with tensor cores. A warp takes the keys of a tile at a time, straight to registers: the
// products are K Q^T, keys by heads, and V^T P^T, elements by heads, for up to eight heads or sixteen. The
// next tile is loaded while this one is multiplied. The warps of a cluster divide the tiles, in turn, so that
// the keys that are seen are spread over all. A warp reads the mask of 32 of its tiles at once, and then only
// keys that are seen.
#pragma once

#include "attention_sums.cuh"

namespace fp4::sm90::attention {

// Which part of a head is in which lane, of lane 4 g + t. The products' K is in an order of its own: 16 bytes
// of a row are the K of two products.
template <int kSize>
struct Lanes {
  static constexpr int kRow = kSize / 8;       // pieces of 16 bytes in a row
  static constexpr int kSteps = kSize / 16;    // products that take a row of K, or make a row of V
  static constexpr int kGroups = 128 / kSize;  // groups of 16 keys in a tile
  static constexpr int kKeys = 16 * kGroups;   // a tile has 4096 bytes of keys
  static constexpr uint32_t kAll = ~0u >> (32 - kKeys);

  // The element, of those in a row of V, that the lane's value i has: pieces g and, of 16, g + 8.
  __device__ __forceinline__ static int element(int i, int g) { return i / 8 * 64 + 8 * g + i % 8; }
};

template <class Half>
constexpr Element kElementOf = Element::kFloat16;
template <>
constexpr Element kElementOf<__nv_bfloat16> = Element::kBFloat16;

template <class Half>
__device__ __forceinline__ uint32_t rounded(float a, float b) {
  uint32_t word;
  if constexpr (kElementOf<Half> == Element::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    memcpy(&word, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(a, b);
    memcpy(&word, &pair, 4);
  }
  return word;
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Element i of the pieces of two rows, side by side.
__device__ __forceinline__ uint32_t pair_of(const uint4& low, const uint4& high, int i) {
  const uint32_t a = word_of(low, i / 2), b = word_of(high, i / 2);
  return i % 2 == 0 ? (a & 0xFFFFu) | b << 16 : a >> 16 | (b & 0xFFFF0000u);
}

// ---- the tiles that a warp has ----

struct Turn {
  int tile = 0;
  uint32_t seen = 0;  // a bit for each key; 0: no tile is left
};

template <int kKeys>
class Turns {
 public:
  __device__ __forceinline__ Turns(const bool* mask, int length, int first, int step)
      : mask_(mask),
        length_(length),
        step_(step),
        next_(first + int(threadIdx.x % 32) * step),
        tiles_((length + kKeys - 1) / kKeys),
        rounds_(first < tiles_ ? (tiles_ - first + 32 * step - 1) / (32 * step) : 0) {}

  // The next tile of which some keys are seen.
  __device__ __forceinline__ Turn next() {
    while (left_ == 0 && rounds_ > 0) {
      --rounds_;
      seen_ = seen(next_);
      now_ = next_, next_ += 32 * step_;
      left_ = __ballot_sync(~0u, seen_ != 0);
    }
    if (left_ == 0) return {};
    const int lane = __ffs(left_) - 1;
    left_ &= left_ - 1;
    return {__shfl_sync(~0u, now_, lane), __shfl_sync(~0u, seen_, lane)};
  }

 private:
  // Which of four bytes are not 0, as four bits. A byte of true may have any value but 0.
  __device__ __forceinline__ static uint32_t bits(uint32_t bytes) {
    const uint32_t tops = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
    return tops * 0x00204081u >> 28;
  }

  __device__ __forceinline__ uint32_t seen(int tile) const {
    if (tile >= tiles_) return 0;
    const int first = tile * kKeys, count = min(kKeys, length_ - first);
    if (mask_ == nullptr) return ~0u >> (32 - count);
    const bool* const mask = mask_ + first;
    uint32_t all = 0;
    if (count == kKeys && reinterpret_cast<uintptr_t>(mask) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < kKeys; i += 16) {
        const uint4 bytes = *reinterpret_cast<const uint4*>(mask + i);
        all |= (bits(bytes.x) | bits(bytes.y) << 4 | bits(bytes.z) << 8 | bits(bytes.w) << 12) << i;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKeys; ++i)
        if (i < count && mask[i]) all |= 1u << i;
    }
    return all;
  }

  const bool* mask_;
  int length_, step_, next_, tiles_, rounds_, now_ = 0;
  uint32_t seen_ = 0, left_ = 0;  // of the 32 tiles: the lane's own, and which have keys that are seen
};

// ---- products ----

// A lane's parts of the rows of a tile, of keys 16 m + key(i).
template <int kSize, int kRows, int kPieces, int kStride>
struct Rows {
  static constexpr int kGroups = Lanes<kSize>::kGroups;
  uint4 pieces[kGroups][kRows][kPieces];

  // Keys that are not seen are not read; they become zeros. `from`: of key 0 of the tile. `key(i)`: of row i.
  template <class Key>
  __device__ __forceinline__ void load(const uint4* from, uint32_t seen, const Key& key) {
    if (seen == Lanes<kSize>::kAll) {
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < kPieces; ++j)
            pieces[m][i][j] = __ldcg(from + (16 * m + key(i)) * Lanes<kSize>::kRow + kStride * j);
      return;
    }
#pragma unroll
    for (int m = 0; m < kGroups; ++m)
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool there = seen >> (16 * m + key(i)) & 1;
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
          pieces[m][i][j] =
              there ? __ldcg(from + (16 * m + key(i)) * Lanes<kSize>::kRow + kStride * j) : uint4{};
      }
  }

  // Puts another row in the place of row `row`. `from`: of that row.
  template <class Key>
  __device__ __forceinline__ void put(const uint4* from, int row, const Key& key) {
#pragma unroll
    for (int m = 0; m < kGroups; ++m)
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (16 * m + key(i) != row) continue;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) pieces[m][i][j] = from[kStride * j];
      }
  }
};

template <int kSize>
using KeyRows = Rows<kSize, 2, kSize / 32, 4>;  // keys g and g + 8; pieces t, t + 4...
template <int kSize>
using ValueRows = Rows<kSize, 4, kSize / 64, 8>;  // keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9; pieces g, g + 8

// A warp's running sums, for kTiles times eight heads. A lane has heads 2 t and 2 t + 1 of each eight, and of
// the values the elements Lanes::element.
template <class Half, int kSize, int kTiles>
struct TileSums {
  using L = Lanes<kSize>;
  static constexpr int kSteps = L::kSteps, kGroups = L::kGroups;
  static constexpr Element kElement = kElementOf<Half>;
  uint32_t q[kTiles][kSteps][2];
  float4 values[kTiles]
               [kSteps];  // elements i and i + kSteps, of both heads: (i, a), (i, b), (i + kSteps, a)...
  float most[kTiles][2], total[kTiles][2];

  // `from`: the first of `heads` queries, which are kStride pieces apart.
  template <int kStride>
  __device__ __forceinline__ void begin(const uint4* from, int heads, int g, int t) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const bool there = 8 * n + g < heads;
      const uint4* const row = from + (8 * n + g) * kStride + t;
#pragma unroll
      for (int j = 0; j < kSteps / 2; ++j) {
        const uint4 piece = there ? row[4 * j] : uint4{};
        q[n][2 * j][0] = piece.x, q[n][2 * j][1] = piece.y;
        q[n][2 * j + 1][0] = piece.z, q[n][2 * j + 1][1] = piece.w;
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) values[n][i] = {};
#pragma unroll
      for (int c = 0; c < 2; ++c) most[n][c] = -FLT_MAX, total[n][c] = 0.f;
    }
  }

  // Scores of keys g and g + 8 of each group, for both heads.
  __device__ __forceinline__ void score(const KeyRows<kSize>& keys, float4 (&scores)[kGroups][kTiles]) const {
#pragma unroll
    for (int m = 0; m < kGroups; ++m)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) scores[m][n] = {};
#pragma unroll
    for (int j = 0; j < kSteps / 2; ++j)
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const uint4 &low = keys.pieces[m][0][j], &high = keys.pieces[m][1][j];
        const uint32_t first[] = {low.x, high.x, low.y, high.y}, second[] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          mma<kElement>(scores[m][n], first, q[n][2 * j][0], q[n][2 * j][1]);
          mma<kElement>(scores[m][n], second, q[n][2 * j + 1][0], q[n][2 * j + 1][1]);
        }
      }
  }

  // Replaces scores by weights, in the type of the values, as the second operand of the next product: heads
  // g, keys 2 t, 2 t + 1, and these + 8. `seen`: of keys g and so on.
  __device__ __forceinline__ void weigh(float4 (&scores)[kGroups][kTiles], uint32_t seen, float scale,
                                        uint32_t (&weights)[kGroups][kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float by[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = most[n][c];
#pragma unroll
        for (int m = 0; m < kGroups; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = part(scores[m][n], i, c);
            score *= scale;
            if (seen >> (16 * m + 8 * i) & 1) largest = fmaxf(largest, score);
          }
#pragma unroll
        for (int d = 4; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
        by[c] = approximate_power_of_two(most[n][c] - largest);
        most[n][c] = largest;
        total[n][c] *= by[c];
#pragma unroll
        for (int m = 0; m < kGroups; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& score = part(scores[m][n], i, c);
            score = seen >> (16 * m + 8 * i) & 1 ? approximate_power_of_two(score - largest) : 0.f;
            total[n][c] += score;
          }
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        values[n][i].x *= by[0], values[n][i].z *= by[0];
        values[n][i].y *= by[1], values[n][i].w *= by[1];
      }
#pragma unroll
      for (int m = 0; m < kGroups; ++m) {
        const float4& w = scores[m][n];
        weights[m][n][0] = transposed(rounded<Half>(w.x, w.y));
        weights[m][n][1] = transposed(rounded<Half>(w.z, w.w));
      }
    }
  }

  __device__ __forceinline__ void add(const ValueRows<kSize>& rows,
                                      const uint32_t (&weights)[kGroups][kTiles][2]) {
#pragma unroll
    for (int m = 0; m < kGroups; ++m)
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const auto& r = rows.pieces[m];
        constexpr int kOther = kSteps;
        const int piece = i / 8, other = (i + kOther) / 8, e = i % 8, o = (i + kOther) % 8;
        const uint32_t a[] = {pair_of(r[0][piece], r[1][piece], e), pair_of(r[0][other], r[1][other], o),
                              pair_of(r[2][piece], r[3][piece], e), pair_of(r[2][other], r[3][other], o)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma<kElement>(values[n][i], a, weights[m][n][0], weights[m][n][1]);
      }
  }

  template <class Shared>
  __device__ __forceinline__ void write(Shared& sh, int warp, int g, int t) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int d = 4; d < 32; d *= 2) total[n][c] += __shfl_xor_sync(~0u, total[n][c], d);
        const int head = 8 * n + 2 * t + c;
        if (g == 0) sh.weights[warp][head] = {most[n][c], total[n][c]};
#pragma unroll
        for (int i = 0; i < kSteps; i += 4)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            sh.values[warp][head][L::element(i + half * kSteps, g) / 4] =
                make_float4(part(values[n][i], half, c), part(values[n][i + 1], half, c),
                            part(values[n][i + 2], half, c), part(values[n][i + 3], half, c));
      }
  }

 private:
  __device__ __forceinline__ static float& part(float4& v, int row, int head) {
    return row == 0 ? (head == 0 ? v.x : v.y) : (head == 0 ? v.z : v.w);
  }
};

// ---- the kernel ----

// Where the queries are, and what is not in the cache: here all keys and values are there. `Update` is the
// kernel's last argument. new_token.cuh has another.
struct NoUpdate {};

template <class Update, class Half, int kSize, int kTiles, int kWarps>
class Token {
 public:
  using Shared = SharedSums<kSize, 8 * kTiles, kWarps>;
  using Sums = TileSums<Half, kSize, kTiles>;

  // Before the kernel before this one has ended: computes addresses.
  __device__ __forceinline__ Token(const AttentionParams&, const Update&, const Place&) {}

  // Called in this order: before the mask is read, and before and after the first tile is loaded.
  __device__ __forceinline__ void load(const AttentionParams& p, const Place& at, Sums& sums) {
    constexpr int kRow = Lanes<kSize>::kRow;
    sums.template begin<kRow>(static_cast<const uint4*>(p.q) + at.first * kRow, at.heads,
                              threadIdx.x % 32 / 4, threadIdx.x % 4);
  }
  __device__ __forceinline__ void find(const AttentionParams&) {}
  __device__ __forceinline__ void make(const AttentionParams&, const Update&, const Place&, Shared&, Sums&) {}

  // The keys of a tile that are in the cache.
  __device__ __forceinline__ uint32_t stored(const Turn& turn) const { return turn.seen; }
  // Puts others in their places.
  __device__ __forceinline__ void put(const Shared&, const Turn&, KeyRows<kSize>&) const {}
  __device__ __forceinline__ void put(const Shared&, const Turn&, ValueRows<kSize>&) const {}
};

template <class Half, int kSize, int kTiles, int kWarps, int kBlocks, class Update>
__global__ void __launch_bounds__(kWarps * 32, kBlocks)
    attention_kernel(const __grid_constant__ AttentionParams p, const void* sinks,
                     const __grid_constant__ Update update) {
  using L = Lanes<kSize>;
  using Its = Token<Update, Half, kSize, kTiles, kWarps>;
  FP4_DYNAMIC_SHARED(uint4, 16, memory);
  auto& sh = *reinterpret_cast<typename Its::Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const Place at(p, 8 * kTiles);
  begin(sh, at, p.split_bits);
  release_next_kernel();
  Its token(p, update, at);
  Turns<L::kKeys> turns(at.mask(p), p.length, warp * at.splits + at.rank, kWarps * at.splits);
  const int64_t cache = at.cache(p) * L::kRow;
  const auto* const k = static_cast<const uint4*>(p.keys) + cache + t;
  const auto* const v = static_cast<const uint4*>(p.values) + cache + g;
  const auto key = [&](int i) { return g + 8 * i; };
  const auto value = [&](int i) { return 2 * t + i % 2 + i / 2 * 8; };
  wait_previous_kernel();

  const Half sink = load_sink<Half>(sinks, at);
  const float scale = p.scale * kLog2E;
  TileSums<Half, kSize, kTiles> sums;
  token.load(p, at, sums);

  KeyRows<kSize> keys;
  ValueRows<kSize> values;
  Turn now = turns.next();
  token.find(p);
  if (now.seen != 0) {
    keys.load(k + int64_t(now.tile) * L::kKeys * L::kRow, token.stored(now), key);
    values.load(v + int64_t(now.tile) * L::kKeys * L::kRow, token.stored(now), value);
  }
  token.make(p, update, at, sh, sums);
  while (now.seen != 0) {
    const Turn next = turns.next();
    const int64_t there = int64_t(next.tile) * L::kKeys * L::kRow;
    float4 scores[L::kGroups][kTiles];
    uint32_t weights[L::kGroups][kTiles][2];
    token.put(sh, now, keys);
    sums.score(keys, scores);
    if (next.seen != 0) keys.load(k + there, token.stored(next), key);
    sums.weigh(scores, now.seen >> g, scale, weights);
    token.put(sh, now, values);
    sums.add(values, weights);
    if (next.seen != 0) values.load(v + there, token.stored(next), value);
    now = next;
  }
  sums.write(sh, warp, g, t);
  finish<Half>(sh, p, at, sinks != nullptr, sink);
}

}  // namespace fp4::sm90::attention
