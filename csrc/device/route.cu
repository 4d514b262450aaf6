// Routing and combine, which come before and after the products of an expert block. The interface is plain C,
// so this file does not depend on torch. The kernels are deterministic and safe in CUDA graphs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "launch.cuh"
#include "ptx.cuh"
#include "types.cuh"

namespace fp4::device {
namespace {

constexpr int kRouteThreads = 1024;
constexpr int kRouteWarps = kRouteThreads / 32;

// --- routing: a stable counting sort of expert ids ---

__device__ int read_id(const void* ids, bool wide, int r, int groups) {
  const int64_t id = wide ? static_cast<const int64_t*>(ids)[r] : static_cast<const int*>(ids)[r];
  return id >= 0 && id < groups ? int(id) : groups;  // ids of no expert sort last
}

__global__ void count_kernel(const void* ids, bool wide, int rows, int groups, int* counts) {
  wait_previous_kernel();
  release_next_kernel();
  FP4_DYNAMIC_SHARED(int, 4, count);
  for (int g = threadIdx.x; g <= groups; g += kRouteThreads) count[g] = 0;
  __syncthreads();
  const int r = blockIdx.x * kRouteThreads + threadIdx.x;
  if (r < rows) atomicAdd(&count[read_id(ids, wide, r, groups)], 1);
  __syncthreads();
  for (int g = threadIdx.x; g <= groups; g += kRouteThreads) counts[blockIdx.x * (groups + 1) + g] = count[g];
}

constexpr int kOwnChunks = 8;  // up to so many chunks, every block of place_kernel counts all ids itself

// Each block places the ids of its chunk: start of the expert + those in earlier chunks + those earlier in
// this one. counts: the result of count_kernel, or null for at most kOwnChunks chunks.
__global__ void __launch_bounds__(kRouteThreads)
    place_kernel(const void* ids, bool wide, int rows, int groups, const int* counts, int* offs,
                 int* sorted_rows, int* position) {
  // The next kernel may fetch the rows that it copies to their places: they were made before this kernel.
  wait_previous_kernel();
  release_next_kernel();
  FP4_DYNAMIC_SHARED(int, 4, shared);
  const int bins = groups + 1;
  int* start =
      shared;  // [bins]: first position of this chunk's ids; until then, the number of ids in earlier chunks
  int* total = start + bins;                                     // [bins]
  auto* warp_count = reinterpret_cast<uint16_t*>(total + bins);  // [warps][bins]
  __shared__ int totals[kRouteWarps];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, chunk = blockIdx.x;
  for (int i = tid; i < kRouteWarps * bins; i += kRouteThreads) warp_count[i] = 0;
  int before = 0, all = 0, id = -1;
  if (counts != nullptr) {
    for (int c = 0; tid < bins && c < gridDim.x; ++c) {
      const int n = counts[c * bins + tid];
      before += c < chunk ? n : 0;
      all += n;
    }
    const int r = chunk * kRouteThreads + tid;
    if (r < rows) id = read_id(ids, wide, r, groups);
  } else {
    if (tid < bins) start[tid] = total[tid] = 0;
    int every[kOwnChunks];
#pragma unroll
    for (int c = 0; c < kOwnChunks; ++c) {
      const int r = c * kRouteThreads + tid;
      every[c] = r < rows ? read_id(ids, wide, r, groups) : -1;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kOwnChunks; ++c) {
      if (every[c] >= 0) atomicAdd(&total[every[c]], 1);
      if (every[c] >= 0 && c < chunk) atomicAdd(&start[every[c]], 1);
      if (c == chunk) id = every[c];
    }
    __syncthreads();
    if (tid < bins) before = start[tid], all = total[tid];
  }
  const uint32_t same = __match_any_sync(~0u, id);
  const int rank = __popc(same & ((1u << lane) - 1));
  // An exclusive scan over the experts, at most one a thread.
  int scan = all;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, scan, d);
    if (lane >= d) scan += other;
  }
  if (lane == 31) totals[warp] = scan;
  __syncthreads();
  if (id >= 0 && rank == 0) warp_count[warp * bins + id] = __popc(same);
  if (tid < bins) {
    for (int w = 0; w < warp; ++w) scan += totals[w];
    start[tid] = scan - all + before;
    if (tid < groups && chunk == 0) offs[tid] = scan;
  }
  __syncthreads();
  if (tid < bins) {
    constexpr int kAtOnce = 8;  // loads in flight together
    int sum = 0;
    for (int first = 0; first < kRouteWarps; first += kAtOnce) {
      int n[kAtOnce];
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) n[w] = warp_count[(first + w) * bins + tid];
#pragma unroll
      for (int w = 0; w < kAtOnce; ++w) {
        warp_count[(first + w) * bins + tid] = sum;
        sum += n[w];
      }
    }
  }
  __syncthreads();
  if (id >= 0) {
    const int at = start[id] + warp_count[warp * bins + id] + rank;
    sorted_rows[at] = chunk * kRouteThreads + tid;
    position[chunk * kRouteThreads + tid] = at;
  }
}

// --- combine ---

// Consecutive columns of any dtype, as they lie in memory. They are loaded whole, so they must be aligned to
// their size, or to 16 bytes if they are larger.
template <int kColumns>
struct Columns {
  uint32_t w[kColumns];  // 16-bit columns take half of these

  template <int kWords>
  __device__ __forceinline__ void load_words(const void* from) {
    if constexpr (kWords == 2) {
      const uint2 u = *static_cast<const uint2*>(from);
      w[0] = u.x, w[1] = u.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 u = static_cast<const uint4*>(from)[i / 4];
        w[i] = u.x, w[i + 1] = u.y, w[i + 2] = u.z, w[i + 3] = u.w;
      }
    }
  }

  __device__ __forceinline__ void load(const void* p, DType type, int64_t i) {
    if (type == DType::kFloat32) {
      load_words<kColumns>(static_cast<const float*>(p) + i);
    } else {
      load_words<kColumns / 2>(static_cast<const uint16_t*>(p) + i);
    }
  }

  __device__ __forceinline__ float value(DType type, int i) const {
    if (type == DType::kFloat32) return __uint_as_float(w[i]);
    const uint32_t u = w[i / 2];
    if (type == DType::kBFloat16) return __uint_as_float(i % 2 ? u & 0xFFFF0000u : u << 16);
    const auto pair = reinterpret_cast<const half2&>(u);
    return __half2float(i % 2 ? __high2half(pair) : __low2half(pair));
  }
};

template <int kColumns>
__device__ __forceinline__ void store(const float (&v)[kColumns], void* out, DType type, int64_t i) {
  if (type == DType::kFloat32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(out) + i);
#pragma unroll
    for (int j = 0; j < kColumns; j += 4) to[j / 4] = make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
    return;
  }
  uint32_t w[kColumns / 2];
#pragma unroll
  for (int j = 0; j < kColumns; j += 2) {
    if (type == DType::kBFloat16) {
      reinterpret_cast<__nv_bfloat162&>(w[j / 2]) = __floats2bfloat162_rn(v[j], v[j + 1]);
    } else {
      reinterpret_cast<half2&>(w[j / 2]) = __floats2half2_rn(v[j], v[j + 1]);
    }
  }
  auto* to = static_cast<uint16_t*>(out) + i;
  if constexpr (kColumns == 8) {
    *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
  } else {
    *reinterpret_cast<uint2*>(to) = make_uint2(w[0], w[1]);
  }
}

struct Combine {
  const void* y;
  const int* position;
  const void* ids;
  bool wide;
  const void* weights;
  DType weight_type;
  const void* bias;
  DType bias_type;
  void* out;
  DType out_type;
  int top_k, groups, n;
};

constexpr int kMaxCombineThreads = 256;

// out[t] = sum over j of weights[t, j] * (y[position of row t * k + j] + bias[its expert]); ids of no expert
// add nothing. A thread takes kColumns columns. The lanes of a warp read the slots of its token, one each.
// Then the rows of kAtOnce slots are loaded at once, and added in the order of the slots. (The launch bound
// of three thread blocks a multiprocessor lets the compiler use enough registers for that. Without the bound
// it loads half of the rows first.)
template <DType kY, int kColumns, bool kBias, int kAtOnce>
__global__ void __launch_bounds__(kMaxCombineThreads, 3) combine_kernel(const Combine p) {
  static_assert(32 % kAtOnce == 0);
  const int t = blockIdx.x, lane = threadIdx.x % 32;
  const int c = (blockIdx.y * blockDim.x + threadIdx.x) * kColumns;
  const int column = c < p.n ? c : 0;
  float sum[kColumns] = {};
  for (int slots = 0; slots < p.top_k; slots += 32) {
    int row = -1, expert = 0;  // -1: nothing to add
    float weight = 0.f;
    if (slots + lane < p.top_k) {
      const int r = t * p.top_k + slots + lane;
      const int id = read_id(p.ids, p.wide, r, p.groups), at = p.position ? p.position[r] : r;
      weight = load_as_float(p.weights, r, p.weight_type);
      if (id != p.groups) row = at, expert = id;
    }
    const int end = min(32, p.top_k - slots);
    wait_previous_kernel();  // for y; all else was there before the kernel that makes y began
    for (int first = 0; first < end; first += kAtOnce) {
      Columns<kColumns> y[kAtOnce], bias[kBias ? kAtOnce : 1];
      int from[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        from[j] = __shfl_sync(~0u, row, first + j);
        // Load row 0 if there is nothing to add: a thread has too few predicates to skip each load by itself.
        y[j].load(p.y, kY, int64_t(max(from[j], 0)) * p.n + column);
        if constexpr (kBias) {
          bias[j].load(p.bias, p.bias_type, int64_t(__shfl_sync(~0u, expert, first + j)) * p.n + column);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float w = __shfl_sync(~0u, weight, first + j);
        if (from[j] < 0) continue;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          float v = y[j].value(kY, i);
          if constexpr (kBias) v += bias[j].value(p.bias_type, i);
          sum[i] += w * v;
        }
      }
    }
  }
  if (c < p.n) store(sum, p.out, p.out_type, int64_t(t) * p.n + c);
}

template <DType kY, int kColumns>
int launch_combine(const Combine& p, int tokens, cudaStream_t stream) {
  // A token has one thread block, or several of equal size if its columns do not fit one. If there are few
  // tokens, the blocks are small, to spread the work over the multiprocessors.
  const int threads = (p.n + kColumns - 1) / kColumns, most = tokens < 64 ? 64 : kMaxCombineThreads;
  const int blocks = (threads + most - 1) / most;
  const dim3 grid(tokens, blocks);
  const int each = (threads + 32 * blocks - 1) / (32 * blocks) * 32;
  const auto start = [&](auto kernel) { return launch_kernel(kernel, {grid, dim3(each)}, true, stream, p); };
  if (p.bias) return start(combine_kernel<kY, kColumns, true, 4>);
  return p.top_k <= 4 ? start(combine_kernel<kY, kColumns, false, 4>)
                      : start(combine_kernel<kY, kColumns, false, 8>);
}

}  // namespace
}  // namespace fp4::device

using namespace fp4::device;

// ids [rows] int32 or int64 -> offs [groups], sorted_rows [rows] (position -> row), position [rows] (row ->
// position). counts: scratch, ceil(rows / 1024) * (groups + 1) ints.
extern "C" int fp4_kernel_route(const void* ids, int wide, int rows, int groups, int* counts, int* offs,
                                int* sorted_rows, int* position, void* stream) {
  auto* s = static_cast<cudaStream_t>(stream);
  const int chunks = (rows + kRouteThreads - 1) / kRouteThreads, bins = groups + 1;
  if (bins > kRouteThreads) return cudaErrorInvalidValue;
  constexpr int kBinBytes = 8 + 2 * kRouteWarps;
  static std::atomic<uint64_t> allowed;
  if (const cudaError_t error = allow_shared(place_kernel, kRouteThreads * kBinBytes, allowed);
      error != cudaSuccess) {
    return error;
  }
  if (chunks > kOwnChunks) {
    const int error = launch_kernel(count_kernel, {dim3(chunks), dim3(kRouteThreads), size_t(bins) * 4}, true,
                                    s, ids, wide != 0, rows, groups, counts);
    if (error != 0) return error;
  } else {
    counts = nullptr;
  }
  return launch_kernel(place_kernel, {dim3(chunks), dim3(kRouteThreads), size_t(bins) * kBinBytes}, true, s,
                       ids, wide != 0, rows, groups, counts, offs, sorted_rows, position);
}

// y float32 or bf16 [rows, n], n a multiple of 4; y, bias and out aligned to 16 bytes.
extern "C" int fp4_kernel_combine(const void* y, DType y_type, const int* position, const void* ids, int wide,
                                  const void* weights, DType weight_type, const void* bias, DType bias_type,
                                  void* out, DType out_type, int tokens, int top_k, int groups, int n,
                                  void* stream) {
  if (n % 4 != 0) return cudaErrorInvalidValue;
  const Combine p{y,   position, ids,   wide != 0, weights, weight_type, bias, bias_type,
                  out, out_type, top_k, groups,    n};
  auto* s = static_cast<cudaStream_t>(stream);
  if (y_type == DType::kFloat32) return launch_combine<DType::kFloat32, 4>(p, tokens, s);
  if (y_type != DType::kBFloat16) return cudaErrorInvalidValue;
  if (n % 8 == 0) return launch_combine<DType::kBFloat16, 8>(p, tokens, s);
  return launch_combine<DType::kBFloat16, 4>(p, tokens, s);
}
