// Grouped GEMM of FP4 rows by FP4 weights with the block-scaled mma.sync of compute capability 12.x. Both
// operands have layout plain: codes [rows, K / 2] and scales [rows, K / block] as fp4::quantize makes them.
//
// Weights are operand A and tokens are N, as in csrc/sm80. A block is persistent, and all of its warps do the
// same work: cp.async copies steps of 256 K into a ring, and ldmatrix reads the codes as the instruction
// takes them. A row of a step is 128 bytes in eight pieces, swizzled so that ldmatrix has no bank conflicts.
// Row i of the first eight rows of an instruction is weight row 2i, and of the second eight 2i + 1. So a
// lane's sums of a token are neighbours in the output. Copies run ahead past the ends of tiles.
//
// Nobody has run this on such a GPU. docs/kernels.md says what was compared with what.
#pragma once

#include <new>
#include <type_traits>

#include "../device/product.cuh"
#include "../device/ptx.cuh"
#include "ptx_sm120.cuh"
#include "scaled_config.cuh"

namespace fp4::sm120 {

template <class Config>
class ScaledBlock {
 public:
  using Shared = SharedStorage<Config>;

  __device__ __forceinline__ ScaledBlock(Shared& shared, const Problem& problem)
      : shared_(shared), problem_(problem) {}

  __device__ __forceinline__ void run() {
    if (walks()) {
      new (&walk()) Walk(problem_.tiling);
      for (int slot = 0; slot < Config::Stages; ++slot) tell(slot);
    }
    __syncthreads();
    aim();
#pragma unroll 1
    for (int i = 0; i + 1 < Config::Stages; ++i) copy_step();
    for (int slot = 0; shared_.info[slot].width > 0; slot = next_slot(slot)) {
      if (walks()) tell((slot + Config::Stages) % kInfoSlots);
      Sums sums = {};
      multiply(typename Config::Widths(), sums, shared_.info[slot]);
      store(sums, slot);
    }
    copy_wait<0>();
    zero_rest();
  }

 private:
  using Walk = typename Shared::Walk;

  // Lane 4g + t has rows 2g (x, y) and 2g + 1 (z, w) of each 16, for tokens 2t and 2t + 1 of each eight. The
  // signs are those of the scales that this lane has seen: of row 2g + t % 2 of each 16, of token g of each
  // eight.
  struct Sums {
    float4 tile[Config::TilesM][Config::Eights];
    uint32_t row_signs[Config::TilesM], token_signs[Config::Eights];
  };

  static __device__ __forceinline__ int warp_m() { return threadIdx.x / kWarp % Config::WarpsM; }
  static __device__ __forceinline__ int warp_n() { return threadIdx.x / kWarp / Config::WarpsM; }

  // ---- tiles ----

  static __device__ __forceinline__ bool walks() { return threadIdx.x < kWarp; }
  __device__ __forceinline__ Walk& walk() {
    return reinterpret_cast<Walk&>(shared_.walks[threadIdx.x % kWarp]);
  }
  static __device__ __forceinline__ int next_slot(int slot) { return (slot + 1) % kInfoSlots; }

  // Returns the output's row at a position of the sorted rows.
  __device__ __forceinline__ int row_at(int position) const {
    return problem_.sorted_rows == nullptr ? position : __ldg(problem_.sorted_rows + position);
  }

  // Writes the next tile of the walk to shared memory, or one of width 0 after the last.
  __device__ __forceinline__ void tell(int slot) {
    Tile tile;
    TileInfo info = {};
    if (walk().next(tile)) {
      info = {tile.width, tile.group, tile.row, tile.rows, tile.column * Config::Rows,
              tile.first, tile.steps, 0,        0};
    }
    for (int i = threadIdx.x; i < info.rows; i += kWarp)
      shared_.source[slot][i] = row_at(info.row + i) / problem_.a_div;
    if (threadIdx.x == 0) shared_.info[slot] = info;
  }

  // ---- copies ----

  __device__ __forceinline__ int weight_scale_bytes() const { return problem_.k / Config::ScaleBlock; }

  // The step that is fetched next.
  struct Cursor {
    int slot = 0;             // of its TileInfo, whose width is 0 after the last tile
    int step = 0, steps = 0;  // the step, and how many its tile has
    int stage = 0;            // destination
    int rows = 0;             // of X
    int weight_rows = 0;
    int64_t weight_row = 0;  // the first, counted over all groups
  };

  __device__ __forceinline__ void aim() {
    const TileInfo& info = shared_.info[cursor_.slot];
    cursor_.step = 0;
    cursor_.steps = info.width > 0 ? info.steps : 0;
    cursor_.rows = info.rows;
    cursor_.weight_rows = problem_.n - info.column;
    cursor_.weight_row = int64_t(info.group) * problem_.n + info.column;
  }

  // Copies `Most` rows or fewer of a step: codes, and the words with scales. row_of(i): where row i lies.
  template <int Most, int kSwizzle, class RowOf>
  __device__ __forceinline__ void copy_rows(uint8_t* to, uint8_t* to_scales, const uint8_t* codes,
                                            const uint8_t* scales, int scale_bytes, int rows,
                                            const RowOf& row_of) const {
    constexpr int kPieces = kRowBytes / kPiece, kPass = Config::Threads / kPieces;
    const int piece = threadIdx.x % kPieces, byte = cursor_.step * kRowBytes + piece * kPiece;
#pragma unroll
    for (int i = 0; i < ceil_div(Most, kPass); ++i) {
      const int row = i * kPass + threadIdx.x / kPieces;
      const bool wanted = row < min(rows, Most) && byte < problem_.k / 2;
      const int64_t from = wanted ? row_of(row) * (problem_.k / 2) + byte : 0;
      copy_16(smem_address(to) + row * kRowBytes + (piece ^ row / kSwizzle % kPieces) * kPiece, codes + from,
              wanted);
    }
    constexpr int kWords = kScaleBytes / 4, kWordPass = Config::Threads / kWords;
    const int word = threadIdx.x % kWords, step_at = cursor_.step * Config::StepScales;
#pragma unroll
    for (int i = 0; i < ceil_div(Most, kWordPass); ++i) {
      const int row = i * kWordPass + threadIdx.x / kWords;
      bool wanted = row < min(rows, Most) && word < Config::ScaleWords;
      const int64_t begin = wanted ? row_of(row) * scale_bytes : 0;
      const int64_t from = (begin + step_at) / 4 * 4 + word * 4;
      wanted = wanted && from < begin + weight_scale_bytes();
      copy_4(smem_address(to_scales) + row * kScaleBytes + word * 4, scales + from, wanted);
    }
  }

  // Copies the step of the cursor, if there is one left.
  __device__ __forceinline__ void copy_step() {
    if (cursor_.steps > 0) {
      const int stage = cursor_.stage, slot = cursor_.slot;
      copy_rows<Config::MaxTokens, 1>(shared_.x[stage], shared_.x_scales[stage], problem_.x,
                                      problem_.x_scales, problem_.x_scale_bytes, cursor_.rows,
                                      [&](int row) { return int64_t(shared_.source[slot][row]); });
      copy_rows<Config::Rows, 2>(shared_.codes[stage], shared_.scales[stage], problem_.codes, problem_.scales,
                                 weight_scale_bytes(), cursor_.weight_rows,
                                 [&](int row) { return cursor_.weight_row + row; });
      cursor_.stage = stage + 1 == Config::Stages ? 0 : stage + 1;
      if (++cursor_.step == cursor_.steps) {
        cursor_.slot = next_slot(slot);
        aim();
      }
    }
    copy_commit();
  }

  // ---- products ----

  // Runs the loop that is compiled for this width of tile.
  template <int Width, int... Others>
  __device__ __forceinline__ void multiply(WidthList<Width, Others...>, Sums& sums, const TileInfo& tile) {
    if (sizeof...(Others) == 0 || tile.width == Width) {
      const int steps = tile.steps;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        copy_wait<Config::Stages - 2>();
        __syncthreads();
        copy_step();
        multiply_step<Width>(sums, (problem_.k - step * kStep) / kPart);
        stage_ = stage_ + 1 == Config::Stages ? 0 : stage_ + 1;
      }
    } else if constexpr (sizeof...(Others) > 0) {
      multiply(WidthList<Others...>(), sums, tile);
    }
  }

  static __device__ __forceinline__ uint32_t load_scales(uint32_t smem) {
    if constexpr (Config::Nvfp4) {
      return load_shared_4(smem);
    } else {
      return load_shared_2(smem);
    }
  }

  // `parts`: how many of the step's parts K has; at least 1.
  template <int Width>
  __device__ __forceinline__ void multiply_step(Sums& sums, int parts) const {
    constexpr int kPairs = Width / Config::WarpsN / 16, kScales = Config::StepScales / (kStep / kPart);
    const int lane = threadIdx.x % kWarp, g = lane / 4, odd = lane % 2, matrix = lane / 8, row = lane % 8;
    const int first_row = warp_m() * (16 * Config::TilesM), first_token = warp_n() * (Width / Config::WarpsN);
    const uint32_t codes =
        smem_address(shared_.codes[stage_]) + (first_row + 2 * row + matrix % 2) * kRowBytes;
    const uint32_t x = smem_address(shared_.x[stage_]) + (first_token + matrix / 2 * 8 + row) * kRowBytes;
    const uint32_t scales = smem_address(shared_.scales[stage_]) + (first_row + 2 * g + odd) * kScaleBytes +
                            (odd ? weight_scale_bytes() % 4 : 0);
    const uint32_t x_scales = smem_address(shared_.x_scales[stage_]) + (first_token + g) * kScaleBytes;
#pragma unroll
    for (int i = 0; i < kStep / kPart; ++i) {
      if (i > 0 && i >= parts) break;
      uint32_t a[Config::TilesM][4], sfa[Config::TilesM];
#pragma unroll
      for (int m = 0; m < Config::TilesM; ++m) {
        load_matrices(codes + m * 16 * kRowBytes + ((2 * i + matrix / 2) ^ row) * kPiece, a[m]);
        sfa[m] = load_scales(scales + m * 16 * kScaleBytes + i * kScales);
        if constexpr (Config::Nvfp4) sums.row_signs[m] |= sfa[m];
      }
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        uint32_t b[4], sfb[2];
        load_matrices(x + p * 16 * kRowBytes + ((2 * i + matrix % 2) ^ row) * kPiece, b);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sfb[e] = load_scales(x_scales + (2 * p + e) * 8 * kScaleBytes + i * kScales);
          if constexpr (Config::Nvfp4) sums.token_signs[2 * p + e] |= sfb[e];
        }
#pragma unroll
        for (int m = 0; m < Config::TilesM; ++m) {
          mma_scaled<Config::Nvfp4>(sums.tile[m][2 * p], a[m], b[0], b[1], sfa[m], sfb[0]);
          mma_scaled<Config::Nvfp4>(sums.tile[m][2 * p + 1], a[m], b[2], b[3], sfa[m], sfb[1]);
        }
      }
    }
  }

  // ---- results ----

  static __device__ __forceinline__ bool has_sign(uint32_t scales) {
    return Config::Nvfp4 && (scales & 0x80808080u) != 0;
  }

  __device__ __forceinline__ void store(const Sums& sums, int slot) const {
    const TileInfo& info = shared_.info[slot];
    const int lane = threadIdx.x % kWarp, t = lane % 4, tokens = info.width / Config::WarpsN;
    const int column = info.column + warp_m() * (16 * Config::TilesM) + lane / 4 * 2;
    const float global = problem_.global_scale == nullptr ? 1.f : __ldg(problem_.global_scale + info.group);
    float2 bias[Config::TilesM];
    bool even_nan[Config::TilesM], odd_nan[Config::TilesM];
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
      even_nan[m] = has_sign(__shfl_sync(~0u, sums.row_signs[m], lane / 4 * 4));
      odd_nan[m] = has_sign(__shfl_sync(~0u, sums.row_signs[m], lane / 4 * 4 + 1));
      bias[m] = make_float2(0.f, 0.f);
      if (problem_.bias != nullptr && column + m * 16 < problem_.n) {
        const int64_t at = int64_t(info.group) * problem_.n + column + m * 16;
        bias[m] = make_float2(load_as_float(problem_.bias, at, problem_.bias_type),
                              load_as_float(problem_.bias, at + 1, problem_.bias_type));
      }
    }
#pragma unroll
    for (int j = 0; j < Config::Eights; ++j) {
      if (8 * j >= tokens) break;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool token_nan = has_sign(__shfl_sync(~0u, sums.token_signs[j], 4 * (2 * t + e)));
        const int token = warp_n() * tokens + 8 * j + 2 * t + e;
        if (token >= info.rows) continue;
        float factor = global;
        if (problem_.x_factor != nullptr) factor *= __ldg(problem_.x_factor + shared_.source[slot][token]);
        const int64_t at = int64_t(row_at(info.row + token)) * problem_.n + column;
#pragma unroll
        for (int m = 0; m < Config::TilesM; ++m) {
          if (column + m * 16 >= problem_.n) continue;
          const float4& d = sums.tile[m][j];
          const float nan = __int_as_float(0x7FFFFFFF);
          const float even = token_nan || even_nan[m] ? nan : (e ? d.y : d.x) * factor + bias[m].x;
          const float odd = token_nan || odd_nan[m] ? nan : (e ? d.w : d.z) * factor + bias[m].y;
          store_pair(problem_.out, at + m * 16, even, odd, problem_.out_type);
        }
      }
    }
  }

  // Zeroes the output's rows that belong to no group.
  __device__ __forceinline__ void zero_rest() const {
    const Rows& rows = problem_.tiling.rows;
    const int thread = blockIdx.x * Config::Threads + threadIdx.x, threads = gridDim.x * Config::Threads;
    const int vectors = problem_.n * (problem_.out_type == DType::kFloat32 ? 4 : 2) / 16;
    auto* const out = static_cast<uint4*>(problem_.out);
    if (problem_.sorted_rows == nullptr) {
      zero_unused_rows(rows, out, vectors, thread, threads);
      return;
    }
    const int last = clamp_rows(rows.group_rows[rows.groups - 1], rows.m);
    for (int64_t i = int64_t(last) * vectors + thread; i < int64_t(rows.m) * vectors; i += threads)
      out[int64_t(row_at(i / vectors)) * vectors + i % vectors] = make_uint4(0, 0, 0, 0);
  }

  Shared& shared_;
  const Problem& problem_;
  Cursor cursor_;
  int stage_ = 0;
};

template <class Config>
__global__ void __launch_bounds__(Config::Threads, 1) scaled_kernel(const __grid_constant__ Problem problem) {
// Other GPUs have no such instruction, and fp4_kernel_scaled launches nothing there.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 1200
  FP4_DYNAMIC_SHARED(uint8_t, 128, memory);
  ScaledBlock<Config>(*reinterpret_cast<SharedStorage<Config>*>(memory), problem).run();
#endif
}

}  // namespace fp4::sm120
