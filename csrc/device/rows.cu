// Converts the rows between the products of an expert block: applies the gate, makes the form that the next
// product reads, and copies rows to the places of their experts. Each kernel is bound by memory and makes one
// pass. The interface is plain C, so this file does not depend on torch. The kernels are deterministic and
// safe in CUDA graphs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "bytes.cuh"
#include "e2m1_sm90.cuh"
#include "launch.cuh"
#include "row_values.cuh"
#include "types.cuh"

namespace fp4::device {
namespace {

[[maybe_unused]] constexpr float kFp8Max = 448.f, kInt8Max = 127.f;
[[maybe_unused]] constexpr float kLeastInt8 =
    0x1p-120f;  // the smallest maximum of a step whose scaling is finite

struct Rows {
  const void* x;
  int count;            // of x
  const int* position;  // [count, copies]: the rows of the output that row r of x becomes; or row r, if null
  int copies;
  const int* end;  // if not null: rows of the output from *end on are not needed
  Gate gate;
  int interleaved;
  int width, padded;
  void* out;
  float* scale;
};

// The largest magnitude of a block.
template <typename T>
__device__ __forceinline__ float largest(const RawBlock<T>& block) {
  using Pair = std::conditional_t<std::is_same_v<T, __nv_bfloat16>, __nv_bfloat162, half2>;
  Pair m = __habs2(reinterpret_cast<const Pair&>(block.w[0]));
#pragma unroll
  for (int i = 1; i < RawBlock<T>::kWords; ++i)
    m = __hmax2(m, __habs2(reinterpret_cast<const Pair&>(block.w[i])));
  return fmaxf(float(m.x), float(m.y));
}

[[maybe_unused]] __device__ __forceinline__ float largest(const float (&v)[kRowValues]) {
  float m = 0.f;
#pragma unroll
  for (float f : v) m = fmaxf(m, fabsf(f));
  return m;
}

// Reduces over the lanes that share a row. kLanes 0 means the whole thread block.
template <int kLanes>
__device__ __forceinline__ float row_max(float v) {
#pragma unroll
  for (int d = (kLanes ? kLanes : 32) / 2; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  if constexpr (kLanes == 0) {
    __shared__ float part[32];
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    for (int w = 0; w < blockDim.x / 32; ++w) v = fmaxf(v, part[w]);
  }
  return v;
}

__device__ __forceinline__ uint32_t pack_fp8(float a, float b, float c, float d) {
  const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return lo | hi << 16;
}

// The number of thread blocks that a multiprocessor should hold if rows share them. With it a thread has 64,
// 80, 96 or 128 registers, enough to hold that many blocks of gated values without spills.
constexpr int blocks_resident(int blocks) { return blocks == 1 ? 8 : blocks == 2 ? 6 : blocks == 3 ? 5 : 4; }

// The factor of a row's values, and the scale that undoes it.
struct Scaling {
  float up, scale;
};

template <Form kForm>
__device__ __forceinline__ Scaling scaling(float amax) {
  if constexpr (kForm == Form::kFp8) return {amax > 0.f ? kFp8Max / amax : 0.f, amax / kFp8Max};
  // The largest value's exponent becomes 14; infinities stay what they are.
  const int exponent = min(max(int(__float_as_uint(amax) >> 23), 15), 254);
  return {__uint_as_float(uint32_t(268 - exponent) << 23), __uint_as_float(uint32_t(exponent - 14) << 23)};
}

// The same for int8, over the 8 lanes that share kInt8Step columns. The scale is NaN or infinity if one of
// the values is.
__device__ __forceinline__ Scaling int8_scaling(const float (&v)[kRowValues]) {
  float most = 0.f;
#pragma unroll
  for (float f : v) most = max_or_nan(most, fabsf(f));
#pragma unroll
  for (int d = kInt8Step / kRowValues / 2; d > 0; d /= 2)
    most = max_or_nan(most, __shfl_xor_sync(~0u, most, d));
  if (most < kLeastInt8) return {0.f, 0.f};  // also where all are zeros
  return {kInt8Max / most, most / kInt8Max};
}

// Packs four values as int8. Adding 1.5 x 2^23 leaves the integer in the low byte.
__device__ __forceinline__ uint32_t pack_int8(float a, float b, float c, float d, float up) {
  constexpr float kMiddle = 12582912.f;
  const auto byte = [&](float v) { return __float_as_uint(fmaf(v, up, kMiddle)); };
  const uint32_t low = permute_bytes(byte(a), byte(b), 0x0040),
                 high = permute_bytes(byte(c), byte(d), 0x0040);
  return permute_bytes(low, high, 0x5410);
}

// Converts a block, times `up`, to words, and exchanges them in the pair or quad of lanes. This lane stores
// each four of the resulting words together.
template <typename T, Form kForm>
__device__ __forceinline__ void to_words(const float (&v)[kRowValues], float up, const SwapLanes& swap,
                                         uint32_t* words) {
  if constexpr (kForm == Form::kSame) {
    uint32_t w[kRowValues / 2];
    pack_values<T>(v, w);
    exchange_halves(w, swap);
#pragma unroll
    for (int j = 0; j < kRowValues / 2; ++j) words[j] = w[j];
  } else if constexpr (kForm == Form::kFp8) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[j] = pack_fp8(v[4 * j] * up, v[4 * j + 1] * up, v[4 * j + 2] * up, v[4 * j + 3] * up);
    }
    transpose_quad(w, swap);
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = w[j];
  } else if constexpr (kForm == Form::kInt8) {
    // The order of 16 K that Int8Words (csrc/sm80/e2m1_to_int8.cuh) reads.
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack_int8(v[2 * j], v[2 * j + 1], v[2 * j + 8], v[2 * j + 9], up);
  } else {
    // Word c has the values k = 4 (c / 2) + c % 2 and k + 2 of the block. The words c of the quad's four
    // blocks are the 8 values from half_position 8c on.
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int k = (4 * part + j) / 2 * 4 + j % 2;
        const half2 pair = __floats2half2_rn(v[k] * up, v[k + 2] * up);
        w[j] = reinterpret_cast<const uint32_t&>(pair);
      }
      transpose_quad(w, swap);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[4 * part + j] = w[j];
    }
  }
}

// Converts each row of x, gated if kGated. kLanes is as in RowPlan; 0 means the whole thread block.
template <typename T, bool kGated, Form kForm, int kLanes, int kBlocks>
__global__ void __launch_bounds__(kLanes ? kRowThreads : 32 * kMaxRowWarps,
                                  kLanes ? blocks_resident(kBlocks) : 1) row_kernel(const Rows p) {
  // Without positions, the previous kernel makes x. Else it makes the positions, and x may be fetched
  // meanwhile.
  if (p.position == nullptr) {
    release_next_kernel();
    wait_previous_kernel();
  }
  const int lanes = kLanes ? kLanes : blockDim.x, lane = threadIdx.x % lanes;
  const int row = kLanes ? blockIdx.x * (kRowThreads / lanes) + threadIdx.x / lanes : blockIdx.x;
  // Only whole warps may return, because lanes exchange values below.
  const int first = __shfl_sync(~0u, row, 0);
  if (first >= p.count) return;
  if (p.position == nullptr && p.end && first >= *p.end) return;
  const int from = min(row, p.count - 1);

  SourceBlock<T, kGated> raw[kBlocks];
  const T* x = static_cast<const T*>(p.x) + int64_t(from) * (kGated ? 2 * p.width : p.width);
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    raw[i].load(x, p.interleaved, p.width, (i * lanes + lane) * kRowValues);
  }
  if (p.position != nullptr) {
    wait_previous_kernel();
    release_next_kernel();  // it may read the routing without waiting for this kernel
  }
  // The destinations of the copies, one in each lane. -1 means none.
  constexpr int kShare = kLanes == 16 ? 16 : 32;
  const int end = p.position && p.end ? *p.end : p.count * p.copies;
  const auto destination = [&](int copy) {
    if (copy >= p.copies || row >= p.count) return -1;
    const int to = p.position ? p.position[int64_t(row) * p.copies + copy] : row;
    return to < end ? to : -1;
  };
  int to = destination(lane % kShare);

  const SwapLanes swap{lane};
  constexpr bool kInt8 = kForm == Form::kInt8;
  constexpr int kBytes = kForm == Form::kFp8 || kInt8 ? 1 : 2, kWords = kRowValues * kBytes / 4;
  constexpr bool kScaled = kForm == Form::kFp8 || kForm == Form::kHalf;  // a scale a row
  float v[kGated ? kBlocks : 1][kRowValues];
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    if constexpr (kGated) {
      raw[i].values(p.gate, p.interleaved, p.width, (i * lanes + lane) * kRowValues, v[i]);
      if constexpr (kScaled) amax = fmaxf(amax, largest(v[i]));
    } else if constexpr (kScaled) {
      amax = fmaxf(amax, largest(raw[i].part[0]));
    }
  }
  Scaling scaled = {1.f, 1.f};
  if constexpr (kScaled) scaled = scaling<kForm>(row_max<kLanes>(amax));
  float step_scale[kInt8 ? kBlocks : 1];
  uint32_t words[kBlocks][kWords];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    auto& values = v[kGated ? i : 0];
    if constexpr (!kGated)
      raw[i].values(p.gate, p.interleaved, p.width, (i * lanes + lane) * kRowValues, values);
    if constexpr (kInt8) {
      scaled = int8_scaling(values);
      step_scale[i] = scaled.scale;
    }
    to_words<T, kForm>(values, scaled.up, swap, words[i]);
  }
  for (int copies = 0; copies < p.copies; copies += kShare) {
    if (copies > 0) to = destination(copies + lane % kShare);
    if (kScaled && to >= 0 && lane < kShare) p.scale[to] = scaled.scale;
    const int count = min(kShare, p.copies - copies);
    for (int j = 0; j < count; ++j) {
      const int at = __shfl_sync(~0u, to, j, kShare);
      if (at < 0) continue;
      const int columns = kForm == Form::kSame ? p.width : p.padded;
      auto* out = static_cast<uint8_t*>(p.out) + int64_t(at) * columns * kBytes;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int block = i * lanes + lane;
#pragma unroll
        for (int h = 0; h < kBytes; ++h) {
          // Where this lane's 16 bytes (four words) go: for a quad, within its 64 columns.
          const int column = kForm == Form::kSame ? half_column(block, h)
                                                  : block / 4 * 64 + (block % 4 * 16 + 64 * h) / kBytes;
          if (column < columns) store_16_bytes(out + column * kBytes, words[i] + 4 * h);
        }
        if constexpr (kInt8) {
          constexpr int kLanes8 = kInt8Step / kRowValues;
          if (block % kLanes8 == 0 && block * kRowValues < columns)
            p.scale[int64_t(block / kLanes8) * p.count * p.copies + at] = step_scale[i];
        }
      }
    }
  }
}

template <typename T, bool kGated, Form kForm>
int launch(Rows p, bool dependent, cudaStream_t stream) {
  const RowPlan plan = row_plan(p.count, p.padded / kRowValues);
  // Without positions, a row waits for *end before it reads anything. This pays only if most rows find it in
  // L1.
  if (p.position == nullptr && p.count <= kFewWarps) p.end = nullptr;
  if (plan.lanes > 32 * kMaxRowWarps) return cudaErrorInvalidValue;
  const auto shared = [&](auto kernel) {  // rows share a thread block
    const int rows = kRowThreads / plan.lanes;
    return launch_kernel(kernel, {dim3((p.count + rows - 1) / rows), dim3(kRowThreads)}, dependent, stream,
                         p);
  };
  const auto whole = [&](auto kernel) {
    return launch_kernel(kernel, {dim3(p.count), dim3(plan.lanes)}, dependent, stream, p);
  };
  if (plan.lanes == 16) return shared(row_kernel<T, kGated, kForm, 16, 3>);
  if (plan.lanes > 32) {
    return plan.blocks == 1   ? whole(row_kernel<T, kGated, kForm, 0, 1>)
           : plan.blocks == 2 ? whole(row_kernel<T, kGated, kForm, 0, 2>)
                              : whole(row_kernel<T, kGated, kForm, 0, 4>);
  }
  return plan.blocks == 1   ? shared(row_kernel<T, kGated, kForm, 32, 1>)
         : plan.blocks == 2 ? shared(row_kernel<T, kGated, kForm, 32, 2>)
         : plan.blocks == 3 ? shared(row_kernel<T, kGated, kForm, 32, 3>)
                            : shared(row_kernel<T, kGated, kForm, 32, 4>);
}

template <typename T, Form kForm>
int launch_form(const Rows& p, bool dependent, cudaStream_t stream) {
  return p.gate.act != Act::kNone ? launch<T, true, kForm>(p, dependent, stream)
                                  : launch<T, false, kForm>(p, dependent, stream);
}

template <typename T>
int launch(const Rows& p, Form form, bool dependent, cudaStream_t stream) {
  if (form == Form::kSame) return launch_form<T, Form::kSame>(p, dependent, stream);
  if constexpr (kHopper) {
    if (form == Form::kFp8) return launch_form<T, Form::kFp8>(p, dependent, stream);
    if (form == Form::kHalf) return launch_form<T, Form::kHalf>(p, dependent, stream);
  } else {
    if (form == Form::kInt8) return launch_form<T, Form::kInt8>(p, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace fp4::device

using namespace fp4::device;

// Converts the rows of x to `out` in `form`: x's type [.., width]; or e4m3 or fp16 [.., padded] with scale
// [..]; or int8 [rows, padded] with scale [padded / kInt8Step, rows]. x is 16-bit and aligned to 16 bytes. It
// has `width` columns (a multiple of 16), or 2 * width if gated. Row r of x goes to the `copies` rows
// position[r, ..] of out, or to row r if position is null (copies is then 1). If end is not null, rows of out
// from *end on may be left unwritten. dependent: the kernel may start while the kernel before it still runs.
// That one may make x, or if position is not null, only position and *end.
extern "C" int fp4_kernel_rows(const void* x, DType x_type, int count, const int* position, int copies,
                               const int* end, Act act, float alpha, float limit, float up_offset,
                               int interleaved, int width, int padded, Form form, void* out, float* scale,
                               int dependent, void* stream) {
  if (count == 0) return 0;
  if (width % kRowValues != 0) return cudaErrorInvalidValue;
  const Gate gate{act, alpha, limit, up_offset};
  const Rows p{x, count, position, copies, end, gate, interleaved, width, padded, out, scale};
  auto* s = static_cast<cudaStream_t>(stream);
  if (x_type == DType::kBFloat16) return launch<__nv_bfloat16>(p, form, dependent, s);
  if (x_type == DType::kFloat16) return launch<__half>(p, form, dependent, s);
  return cudaErrorInvalidValue;
}
