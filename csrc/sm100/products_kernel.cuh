// Grouped GEMM of FP4 or e4m3 rows by FP4 weights with the tensor cores of compute capability 10.x (tcgen05).
//
// Weights are operand A, 128 rows of them, and tokens are N: 16 or a multiple. So few tokens cost no padding
// beyond 16. A block is persistent, and walks over tiles in each of its roles. Steps of 256 K (e4m3: 128) go
// through a ring: the copy engine brings codes of both operands, swizzled, and the weights' scales, which
// memory holds in the order of tensor memory. Scales of X lie in rows there, and a tile may begin at any row.
// So two warps arrange them, in turn. With groups along K they arrange those of both operands. For each step
// one thread copies the scales to tensor memory and starts four products. Sums have two buffers in tensor
// memory: four warps store one while the other fills.
//
// Two blocks may share a tile (a pair). Each has 128 rows of the weights and of the sums, and loads half of
// the tokens. One product of the tensor cores reads both halves, and writes the sums of both blocks.
//
// Nobody has run this on such a GPU. docs/kernels.md says what was compared with what.
#pragma once

#include <type_traits>

#include "../device/product.cuh"
#include "../sm90/ptx_sm90.cuh"
#include "products_walk.cuh"

namespace fp4::sm100 {

using sm90::barrier_arrive_remote;
using sm90::barrier_expect_bytes;
using sm90::barrier_init_fence;
using sm90::cluster_rank;
using sm90::cluster_sync;
using sm90::elect_lane;
using sm90::fence_async_proxy;

template <class Config>
class ProductBlock {
 public:
  using Shared = SharedStorage<Config>;
  using Walk = ProductWalk<Config>;
  static constexpr int kCtas = Config::Ctas;
  static constexpr uint16_t kPair = 3;  // both blocks, a bit mask

  __device__ __forceinline__ ProductBlock(Shared& shared, const Problem& problem, const Maps& maps)
      : shared_(shared), problem_(problem), maps_(maps), rank_(kCtas == 1 ? 0 : cluster_rank()) {}

  __device__ __forceinline__ void run() {
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x == 0) init_barriers();
    if (warp == kProductWarp) tensor_allocate<kCtas>(smem_address(&shared_.columns), kColumns);
    wait_for_all();
    const uint32_t columns = shared_.columns;
    if (warp == kCopyWarp) {
      copy();
    } else if (warp == kProductWarp) {
      if (rank_ == 0) multiply(columns);
    } else if (warp < kStoreWarp) {
      arrange_scales(warp - kScaleWarp);
    } else {
      store(columns);
    }
    wait_for_all();
    if (warp == kProductWarp) tensor_free<kCtas>(columns, kColumns);
  }

 private:
  // A pair's products wait on the barriers of block 0, which starts the products.
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < Config::Stages; ++i) {
      // The copies, and in each block a warp that arranges scales.
      barrier_init(smem_address(&shared_.full[i]), 1 + kCtas * kWarp);
      barrier_init(smem_address(&shared_.empty[i]), 1);
    }
    for (int i = 0; i < kBuffers; ++i) {
      barrier_init(smem_address(&shared_.sums_full[i]), 1);
      barrier_init(smem_address(&shared_.sums_empty[i]), kCtas * kStoreThreads);
    }
    for (int i = 0; Config::Clc && i < kResponses; ++i) {
      barrier_init(smem_address(&shared_.responses_full[i]), 1);
      // All threads read a response but those of block 1 that start no products.
      barrier_init(smem_address(&shared_.responses_empty[i]), kCtas * kThreads - (kCtas - 1) * kWarp);
    }
    barrier_init_fence();
  }

  // Waits for all threads of the block, and of the pair.
  static __device__ __forceinline__ void wait_for_all() {
    tensor_fence_before();
    if constexpr (kCtas == 1) {
      __syncthreads();
    } else {
      __syncwarp();
      cluster_sync();
    }
    tensor_fence_after();
  }

  // Arrives at a barrier on which products wait. A thread that wrote scales has told the other engines before
  // (fence_async_proxy), also for a copy that the other block starts.
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    if constexpr (kCtas == 1) {
      barrier_arrive(smem_address(&barrier));
    } else {
      barrier_arrive_remote(smem_address(&barrier), 0);
    }
  }

  // Returns this block's weight tile.
  __device__ __forceinline__ int weight_tile(const Tile& tile) const { return tile.column * kCtas + rank_; }

  // Returns the tokens that the tensor cores compute.
  static __device__ __forceinline__ int tokens_of(const Tile& tile) {
    return ceil_div(tile.rows, kEachTokens) * kEachTokens;
  }

  // Returns how many parts a step has. K may end inside of it.
  static __device__ __forceinline__ int parts_of(const ProductTile& tile, int step) {
    return min(kParts, ceil_div(tile.k_end - tile.k_copied, Config::Part) - step * kParts);
  }

  // ---- copies ----

  // One thread waits and copies. The other lanes only walk: a lane that tests a barrier after the leader went
  // on might find that two phases have passed, and wait for ever.
  __device__ __forceinline__ void copy() {
    const bool leads = elect_lane();
    Walk walk(problem_, shared_, rank_ == 0);
    ProductTile tile;
    Ring<Config::Stages> ring;
    while (walk.next(tile)) {
      if (leads) copy_tile(tile, ring);
      __syncwarp();
    }
    // The block must not end before the last commits have arrived.
    for (int i = 0; leads && i < Config::Stages; ++i, ring.next())
      barrier_wait(smem_address(&shared_.empty[ring.index]), ring.parity ^ 1);
    __syncwarp();
  }

  // Bytes that a barrier counts for a row of weights: those in global memory. Containers are not counted.
  static constexpr int kCopied = Config::Step / 2;

  // A box begins at element step * 128 of a row, whether these are packed bytes or e4m3, or codes that the
  // copy puts into containers. Along K these are packed bytes behind the first box.
  //
  // Each block of a pair copies its own weights and its share of the tokens. Block 0's barrier counts the
  // bytes of both. If the number of weight tiles is odd, the last pair's second block has no weights. Its
  // sums are those of an earlier step's weights, and nobody stores them.
  __device__ __forceinline__ void copy_tile(const ProductTile& tile, Ring<Config::Stages>& ring) {
    const int tiles = ceil_div(problem_.n, kRows), own = weight_tile(tile);
    const int weight_row = tile.weights * problem_.n + own * kRows, scale_row = tile.weights * tiles + own;
    const int tokens = tokens_of(tile) / kCtas, boxes = ceil_div(tokens, kBoxRows);
    const int x_row = tile.x_row + rank_ * tokens;
    const bool has_weights = own < tiles;
    const int with_weights = min(kCtas, tiles - tile.column * kCtas);  // blocks of the pair
    constexpr int kScaleBytes = Config::AlongK ? 0 : Config::StepBlocks * kBlockBytes;
    constexpr int kScaleElements = kScaleBytes / 8;
    const int bytes = with_weights * (kRows * kCopied + kScaleBytes) + kCtas * boxes * kBoxRows * kRowBytes;
    for (int step = 0; step < tile.steps; ++step, ring.next()) {
      const uint32_t full = smem_address(&shared_.full[ring.index]), told = leading_barrier<kCtas>(full);
      const int element = (Config::AlongK ? tile.k_copied / 2 : 0) + step * kRowBytes;
      barrier_wait(smem_address(&shared_.empty[ring.index]), ring.parity ^ 1);
      if (rank_ == 0) barrier_expect_bytes(full, bytes);
      if (has_weights) {
        load_box<kCtas>(smem_address(shared_.codes[ring.index]), &maps_.codes, told, element, weight_row);
        if constexpr (!Config::AlongK) {
          load_box<kCtas>(smem_address(shared_.scales[ring.index]), &maps_.scales, told,
                          step * kScaleElements, scale_row);
        }
      }
      for (int i = 0; i < boxes; ++i) {
        load_box<kCtas>(smem_address(shared_.x[ring.index]) + i * kBoxRows * kRowBytes, &maps_.x, told,
                        element, x_row + i * kBoxRows);
      }
    }
  }

  // ---- scales of X, and with groups along K those of the weights ----

  // The words of a step for each of a lane's rows: rows lane, lane + 32, lane + 64, lane + 96 of each block.
  using RowScales = std::conditional_t<Config::Nvfp4, uint4, std::conditional_t<Config::Fp8, uint1, uint2>>;
  struct ScalesOfX {
    RowScales row[Config::Blocks][4];
  };
  struct ScalesOfBoth {
    ScalesAlongK<Config> x[Config::Blocks], weights;
  };
  using Scales = std::conditional_t<Config::AlongK, ScalesOfBoth, ScalesOfX>;
  static_assert(sizeof(RowScales) == Config::Step / Config::ScaleBlock);

  __device__ __forceinline__ void load_scales(const ProductTile& tile, int step, ScalesOfX& found) const {
#pragma unroll
    for (int block = 0; block < Config::Blocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = block * 128 + i * kWarp + threadIdx.x % kWarp;
        found.row[block][i] = {};
        if (Config::Fp8 && problem_.x_scales == nullptr) {
          found.row[block][i].x = 0x7F7F7F7Fu;  // ones
        } else if (row < tile.rows && step < tile.steps) {
          const int64_t from = int64_t(tile.x_row + row) * problem_.x_scale_bytes + step * sizeof(RowScales);
          if constexpr (Config::Fp8) {
            found.row[block][i].x = __ldg(reinterpret_cast<const unsigned*>(problem_.x_scales + from));
          } else {
            found.row[block][i] = __ldg(reinterpret_cast<const RowScales*>(problem_.x_scales + from));
          }
        }
      }
    }
  }

  __device__ __forceinline__ void load_scales(const ProductTile& tile, int step, ScalesOfBoth& found) const {
    const int first = (tile.k_copied + step * Config::Step) / Config::ScaleBlock;
    const int row_bytes = problem_.x_scale_bytes;
    const bool exists = step < tile.steps;
#pragma unroll
    for (int block = 0; block < Config::Blocks; ++block) {
      const int rows = exists ? tile.rows - block * 128 : 0;
      found.x[block].load(problem_.x_scales, row_bytes, tile.x_row + block * 128, rows, first);
    }
    const int row = weight_tile(tile) * kRows;
    found.weights.load(problem_.scales, row_bytes, row, exists ? problem_.n - row : 0, first);
  }

  __device__ __forceinline__ void store_scales(const ProductTile&, int, int stage,
                                               const ScalesOfX& scales) const {
    const uint32_t to = smem_address(shared_.x_scales[stage]) + threadIdx.x % kWarp * 16;
#pragma unroll
    for (int block = 0; block < Config::Blocks; ++block) {
      const RowScales(&row)[4] = scales.row[block];
      const uint32_t at = to + block * Config::StepBlocks * kBlockBytes;
      store_shared_16(at, pick(row[0].x, row[1].x, row[2].x, row[3].x));
      if constexpr (!Config::Fp8) {
        store_shared_16(at + kBlockBytes, pick(row[0].y, row[1].y, row[2].y, row[3].y));
      }
      if constexpr (Config::Nvfp4) {
        store_shared_16(at + 2 * kBlockBytes, pick(row[0].z, row[1].z, row[2].z, row[3].z));
        store_shared_16(at + 3 * kBlockBytes, pick(row[0].w, row[1].w, row[2].w, row[3].w));
      }
    }
  }
  static __device__ __forceinline__ uint4 pick(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return make_uint4(without_signs<Config>(a), without_signs<Config>(b), without_signs<Config>(c),
                      without_signs<Config>(d));
  }

  __device__ __forceinline__ void store_scales(const ProductTile& tile, int step, int stage,
                                               const ScalesOfBoth& scales) const {
    constexpr int kBlock = Config::ScaleBlock;
    const int step_at = tile.k_copied + step * Config::Step, first = step_at / kBlock;
    const int begin = (tile.k_begin - step_at) / kBlock, end = (tile.k_end - step_at) / kBlock;
    constexpr int kBytes = Config::StepBlocks * kBlockBytes;
#pragma unroll
    for (int block = 0; block < Config::Blocks; ++block)
      scales.x[block].store(smem_address(shared_.x_scales[stage]) + block * kBytes, first, begin, end);
    scales.weights.store(smem_address(shared_.scales[stage]), first, begin, end);
  }

  // Arranges the scales of every other step. Those of the next such step load meanwhile. Each block of a pair
  // needs the scales of all tokens, and arranges them.
  __device__ __forceinline__ void arrange_scales(int own) {
    Walk walk(problem_, shared_, false);
    ProductTile tile;
    Ring<Config::Stages> ring;
    int turn = 0;
    while (walk.next(tile)) {
      Scales next;
      load_scales(tile, turn == own ? 0 : 1, next);
      for (int step = 0; step < tile.steps; ++step, ring.next(), turn ^= 1) {
        if (turn != own) continue;
        const Scales now = next;
        load_scales(tile, step + kScaleWarps, next);
        barrier_wait(smem_address(&shared_.empty[ring.index]), ring.parity ^ 1);
        store_scales(tile, step, ring.index, now);
        fence_async_proxy();
        arrive(shared_.full[ring.index]);
      }
    }
  }

  // ---- products ----

  // As in copy(), one thread waits and starts the products.
  __device__ __forceinline__ void multiply(uint32_t columns) {
    const bool leads = elect_lane();
    Walk walk(problem_, shared_, false);
    ProductTile tile;
    Ring<Config::Stages> ring;
    Ring<kBuffers> buffer;
    for (; walk.next(tile); buffer.next()) {
      if (leads) multiply_tile(tile, columns, ring, buffer);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void multiply_tile(const ProductTile& tile, uint32_t columns,
                                                Ring<Config::Stages>& ring, const Ring<kBuffers>& buffer) {
    const int tokens = tokens_of(tile);
    const uint32_t sums = columns + buffer.index * Config::MaxTokens;
    barrier_wait(smem_address(&shared_.sums_empty[buffer.index]), buffer.parity ^ 1);
    tensor_fence_after();  // a tile may have no step
    for (int step = 0; step < tile.steps; ++step, ring.next()) {
      barrier_wait(smem_address(&shared_.full[ring.index]), ring.parity);
      tensor_fence_after();
      start_step(columns, sums, tokens, ring.index, parts_of(tile, step), step > 0);
      tensor_commit<kCtas>(smem_address(&shared_.empty[ring.index]), kPair);
    }
    tensor_commit<kCtas>(smem_address(&shared_.sums_full[buffer.index]), kPair);
  }

  __device__ __forceinline__ void start_step(uint32_t columns, uint32_t sums, int tokens, int stage,
                                             int parts, bool keep) const {
    const uint32_t a_scales = columns + Config::ScaleColumn, b_scales = columns + Config::XScaleColumn;
    const int blocks = Config::Blocks == 1 ? 1 : ceil_div(tokens, 128);
    for (int i = 0; i < ceil_div(parts, Config::BlockParts); ++i) {
      tensor_copy<kCtas>(a_scales + i * kBlockColumns,
                         scales_descriptor(smem_address(shared_.scales[stage]) + i * kBlockBytes));
      for (int block = 0; block < blocks; ++block) {
        tensor_copy<kCtas>(b_scales + (i * Config::Blocks + block) * kBlockColumns,
                           scales_descriptor(smem_address(shared_.x_scales[stage]) +
                                             (block * Config::StepBlocks + i) * kBlockBytes));
      }
    }
    const uint64_t a = codes_descriptor(smem_address(shared_.codes[stage]));
    const uint64_t b = codes_descriptor(smem_address(shared_.x[stage]));
    const uint32_t instruction = instruction_descriptor<Config::Formats, kCtas>(tokens);
    for (int i = 0; i < parts; ++i) {
      const int scales = i / Config::BlockParts, first = i % Config::BlockParts * Config::PartScales;
      tensor_multiply<kCtas, Config::Part, Config::ScaleBlock>(
          sums, a + i * kNextPart, b + i * kNextPart, instruction | first_scale(first),
          a_scales + scales * kBlockColumns, b_scales + scales * Config::Blocks * kBlockColumns,
          keep || i > 0);
    }
  }

  // ---- results ----

  // A thread has one weight row, and tokens one after the other.
  __device__ __forceinline__ void store(uint32_t columns) {
    const int quarter = threadIdx.x / kWarp % 4;
    Walk walk(problem_, shared_, false);
    ProductTile tile;
    Ring<kBuffers> buffer;
    for (; walk.next(tile); buffer.next()) {
      if (Config::Clc) zero_share(walk.id());
      const int column = weight_tile(tile) * kRows + quarter * kWarp + threadIdx.x % kWarp;
      const bool exists = column < problem_.n;
      const float global =
          problem_.global_scale == nullptr ? 1.f : __ldg(problem_.global_scale + tile.weights);
      float bias = 0;
      if (problem_.bias != nullptr && exists) {
        bias = load_as_float(problem_.bias, int64_t(tile.group) * problem_.n + column, problem_.bias_type);
      }
      const uint32_t sums =
          columns + (static_cast<uint32_t>(quarter * kWarp) << 16) + buffer.index * Config::MaxTokens;
      barrier_wait(smem_address(&shared_.sums_full[buffer.index]), buffer.parity);
      tensor_fence_after();
#pragma unroll 1
      for (int token = 0; token < tile.rows; token += kEachTokens) {
        uint32_t values[kEachTokens] = {};
        __syncwarp();                             // lanes without a row stored nothing
        if (!Config::AlongK || tile.steps > 0) {  // a group along K can be empty
          tensor_load(sums + token, values);
          tensor_load_wait(values);
        }
#pragma unroll
        for (int i = 0; i < kEachTokens; ++i) {
          if (token + i >= tile.rows || !exists) continue;
          const int64_t row = tile.row + token + i;
          float factor = global;
          if (problem_.x_factor != nullptr) factor *= __ldg(problem_.x_factor + tile.x_row + token + i);
          const float value = __uint_as_float(values[i]) * factor + bias;
          store_one(problem_.out, row * problem_.n + column, value, problem_.out_type);
        }
      }
      tensor_fence_before();
      arrive(shared_.sums_empty[buffer.index]);
    }
    if (!Config::Clc) zero_share(blockIdx.x / kCtas);
  }

  // Zeroes the share that a cluster of the launch has of the rows of no group.
  __device__ __forceinline__ void zero_share(int cluster) const {
    const int vectors = problem_.n * (problem_.out_type == DType::kFloat32 ? 4 : 2) / 16;
    zero_unused_rows(problem_.tiling.rows, static_cast<uint4*>(problem_.out), vectors,
                     (cluster * kCtas + rank_) * kStoreThreads + threadIdx.x - kStoreWarp * kWarp,
                     gridDim.x * kStoreThreads);
  }

  Shared& shared_;
  const Problem& problem_;
  const Maps& maps_;
  const int rank_;  // of the block in its pair
};

template <class Config>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Problem problem) {
// Other GPUs have no such instructions, and fp4_kernel_products launches nothing there.
#if !defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1100)
  FP4_DYNAMIC_SHARED(uint8_t, 1024, memory);
  ProductBlock<Config>(*reinterpret_cast<SharedStorage<Config>*>(memory), problem, maps).run();
#endif
}

}  // namespace fp4::sm100
