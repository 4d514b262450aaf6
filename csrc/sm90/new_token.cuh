// Attention whose queries are not ready, and whose newest key and value are not in the cache yet: each thread
// block norms and rotates its query heads and this key (update_cache.cu does the same), and one block of
// those that share the key writes it and the value. Every block takes both from its own shared memory, so
// that none waits for another's write. What this reads is loaded together with the mask, and the first tiles
// of the cache are on their way while it is computed.
#pragma once

#include "../device/update_cache.h"
#include "attention.cuh"
#include "heads.cuh"

namespace fp4::sm90::attention {

template <class Half, int kSize, int kTiles, int kWarps>
class Token<UpdateCacheParams, Half, kSize, kTiles, kWarps> {
  using L = Lanes<kSize>;
  using Stored = StoredHead<Half, kSize / 64>;
  using Its = Head<Half, kSize / 64>;
  static constexpr int kHeads = 8 * kTiles;
  // Unit 0 is the key, unit 1 the value, the others are queries. Each warp has every kWarps-th unit.
  static constexpr int kQueries = 2, kUnits = (kQueries + kHeads + kWarps - 1) / kWarps;
  // Pieces from a query to the next. The rows that eight lanes read at once are in different banks.
  static constexpr int kStride = L::kRow + 4;

 public:
  struct Shared : SharedSums<kSize, kHeads, kWarps> {
    uint4 queries[kHeads][kStride], key[L::kRow], value[L::kRow];
  };
  using Sums = TileSums<Half, kSize, kTiles>;

  __device__ __forceinline__ Token(const AttentionParams& p, const UpdateCacheParams& u, const Place& at) {
    const int64_t kv_row = int64_t(at.sequence) * p.kv_heads + at.kv_head;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = warp + kWarps * i;
      const void* const from = unit == 0 ? u.k : unit == 1 ? u.v : u.q;
      const int64_t row = unit < kQueries ? kv_row : at.first + unit - kQueries;
      from_[i] = unit < kQueries + at.heads ? Stored::place(from, row) : nullptr;
    }
    const int64_t angle = u.one_angle ? 0 : at.sequence;
    from_cos_ = Stored::place(u.cos, angle), from_sin_ = Stored::place(u.sin, angle);
    const auto weight = [](const void* norm) { return norm != nullptr ? Stored::place(norm, 0) : nullptr; };
    from_first_norm_ = weight(warp == 0 ? u.k_norm : u.q_norm), from_norm_ = weight(u.q_norm);
    from_start_ = u.start;
  }

  __device__ __forceinline__ void load(const AttentionParams&, const Place&, Sums&) {
    const auto load = [](const Part<kSize / 64>* from) {
      return from != nullptr ? Stored::load(from) : Stored();
    };
    start_ = *from_start_;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) heads_[i] = load(from_[i]);
    cos_ = Stored::load(from_cos_), sin_ = Stored::load(from_sin_);
    first_norm_ = load(from_first_norm_), norm_ = load(from_norm_);
  }

  __device__ __forceinline__ void find(const AttentionParams& p) {
    const bool inside = start_ >= 0 && start_ < p.length;
    tile_ = inside ? int(start_) / L::kKeys : -1, row_ = inside ? int(start_) % L::kKeys : 0;
  }

  __device__ __forceinline__ void make(const AttentionParams& p, const UpdateCacheParams& u, const Place& at,
                                       Shared& sh, Sums& sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Its x[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) x[i] = Its(heads_[i]);
    if (u.q_norm != nullptr || u.k_norm != nullptr) {
      float squares[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) squares[i] = x[i].squares();
#pragma unroll
      for (int d = 16; d > 0; d /= 2)
#pragma unroll
        for (int i = 0; i < kUnits; ++i) squares[i] += __shfl_xor_sync(~0u, squares[i], d);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const Its normed =
            i == 0 ? x[i].normed(first_norm_, squares[i], u.eps) : x[i].normed(norm_, squares[i], u.eps);
        if ((warp + kWarps * i == 0 ? u.k_norm : u.q_norm) != nullptr) x[i] = normed;
      }
    }
    const bool writes = at.rank == 0 && at.part == 0 && tile_ >= 0;
    const int64_t to = at.cache(p) + tile_ * L::kKeys + row_;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = warp + kWarps * i;
      const Stored made = x[i].rotated(cos_, sin_).stored();
      if (unit == 0) {
        made.store(sh.key, 0);
        if (writes) made.store(u.keys, to);
      } else if (unit == 1) {
        heads_[i].store(sh.value, 0);
        if (writes) heads_[i].store(u.values, to);
      } else if (unit < kQueries + at.heads) {
        made.store(sh.queries[unit - kQueries], 0);
      }
    }
    __syncthreads();
    sums.template begin<kStride>(sh.queries[0], at.heads, lane / 4, lane % 4);
  }

  __device__ __forceinline__ uint32_t stored(const Turn& turn) const {
    return has(turn) ? turn.seen & ~(1u << row_) : turn.seen;
  }

  __device__ __forceinline__ void put(const Shared& sh, const Turn& turn, KeyRows<kSize>& keys) const {
    if (!has(turn)) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    keys.put(sh.key + t, row_, [&](int i) { return g + 8 * i; });
  }
  __device__ __forceinline__ void put(const Shared& sh, const Turn& turn, ValueRows<kSize>& values) const {
    if (!has(turn)) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    values.put(sh.value + g, row_, [&](int i) { return 2 * t + i % 2 + i / 2 * 8; });
  }

 private:
  // Whether the tile has the new key, and it is seen.
  __device__ __forceinline__ bool has(const Turn& turn) const {
    return turn.tile == tile_ && (turn.seen >> row_ & 1);
  }

  const Part<kSize / 64>*from_[kUnits], *from_cos_, *from_sin_, *from_first_norm_, *from_norm_;
  const int64_t* from_start_;
  Stored heads_[kUnits], cos_, sin_;
  Stored first_norm_, norm_;  // the weights of the norms of unit i = 0, and of the others
  int64_t start_;
  int tile_, row_;  // of the new key; tile -1: it is outside the cache
};

}  // namespace fp4::sm90::attention
