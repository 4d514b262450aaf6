// Weights into and out of layout sm90, on the device. The order is that of csrc/cpu/sm90_layout.h: a lane (g,
// t) of a warp owns, of a tile of 16 rows by 64 k, the scale block t of rows 2g and 2g + 1. A plain C
// interface, so that nothing here knows torch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fp4::sm90 {
namespace {

constexpr int kThreads = 256;

// Where one block of 16 lies: the lane's place in its tile, and the weight's row and k.
struct Place {
  int64_t matrix_row;  // over all matrices
  int k;
  int64_t code, scale;  // in bytes; the block's two words and its scale

  // i counts (row pair of all matrices, row of the pair, block of the padded row), the layout's fastest order
  // last.
  __device__ Place(int64_t i, int kp) {
    const int steps = kp / 64;
    const int r = i & 1, t = i >> 1 & 3, g = i >> 3 & 7;
    const int64_t tile_step = i >> 6;
    const int64_t tile = tile_step / steps;
    const int step = int(tile_step - tile * steps);
    matrix_row = tile * 16 + 2 * g + r;
    k = step * 64 + t * 16;
    const int lane = 4 * g + t;
    code = tile_step * 512 + lane * 16 + r * 8;
    scale = (tile * (kp / 128) + step / 2) * 128 + lane * 4 + step % 2 * 2 + r;
  }
};

__device__ int magnitude_bit(int k) { return k % 8 / 4 * 16 + k % 4 * 4; }
__device__ int sign_bit(int k) { return k % 4 * 8 + (k % 8 / 4 == 0 ? 7 : 3); }

__global__ void pack_kernel(const uint8_t* packed, const uint8_t* scales, int64_t count, int k, int kp,
                            uint8_t* to_packed, uint8_t* to_scales) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Place at(i, kp);
  uint64_t codes = 0;
  uint8_t scale = 0;
  if (at.k < k) {
    codes = *reinterpret_cast<const uint64_t*>(packed + at.matrix_row * (k / 2) + at.k / 2);
    scale = scales[at.matrix_row * (k / 16) + at.k / 16];
  }
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint32_t code = codes >> (4 * j) & 15;
    words[j / 8] |= (code & 7) << magnitude_bit(j) | (code >> 3) << sign_bit(j);
  }
  *reinterpret_cast<uint2*>(to_packed + at.code) = make_uint2(words[0], words[1]);
  const int mantissa = scale & 7;
  to_scales[at.scale] = scale | (mantissa == 0 || mantissa == 7 ? 0x80 : 0);
}

template <typename T>
__device__ T convert(float v);
template <>
__device__ float convert(float v) {
  return v;
}
template <>
__device__ __nv_bfloat16 convert(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __half convert(float v) {
  return __float2half_rn(v);
}

// value = (code * scale) * factor, rounded once.
template <typename T>
__global__ void dequantize_kernel(const uint8_t* packed, const uint8_t* scales, const float* global_scale,
                                  int64_t count, int64_t n, int kp, T* out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Place at(i, kp);
  const uint2 words = *reinterpret_cast<const uint2*>(packed + at.code);
  __nv_fp8_e4m3 s;
  s.__x = scales[at.scale] & 0x7F;
  const float scale = float(s);
  const float factor = global_scale[at.matrix_row / n];
  alignas(16) T v[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint32_t word = j < 8 ? words.x : words.y;
    const uint32_t m = word >> magnitude_bit(j) & 7;
    // Arithmetic instead of a table in memory: e2m1 is 0.5 * m below 2, else (2 + m % 2) * 2^(m / 2 - 2).
    const float magnitude = m < 4 ? 0.5f * m : (2 + (m & 1)) * (m < 6 ? 1.f : 2.f);
    const float value = magnitude * scale;
    const bool negative = word >> sign_bit(j) & 1;
    if constexpr (sizeof(T) == 8) {
      v[j] = (negative ? -double(value) : double(value)) * factor;
    } else {
      v[j] = convert<T>((negative ? -value : value) * factor);
    }
  }
  auto* to = reinterpret_cast<uint4*>(out + at.matrix_row * kp + at.k);
#pragma unroll
  for (int j = 0; j < int(sizeof(v) / 16); ++j) to[j] = reinterpret_cast<const uint4*>(v)[j];
}

int64_t blocks_of(int64_t count) { return (count + kThreads - 1) / kThreads; }

}  // namespace
}  // namespace fp4::sm90

using namespace fp4::sm90;

// packed [rows, k / 2] and e4m3 scales [rows, k / 16] in plain order, rows over all matrices, to layout sm90.
extern "C" int fp4_sm90_pack(const uint8_t* packed, const uint8_t* scales, int64_t rows, int k, int kp,
                             uint8_t* to_packed, uint8_t* to_scales, void* stream) {
  const int64_t count = rows * (kp / 16);
  if (count == 0) return 0;
  pack_kernel<<<blocks_of(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(packed, scales, count, k,
                                                                                    kp, to_packed, to_scales);
  return cudaGetLastError();
}

// Layout sm90 to values [rows, kp]; out_type: 0 float32, 1 bfloat16, 2 float16, 3 float64; n rows a matrix.
extern "C" int fp4_sm90_dequantize(const uint8_t* packed, const uint8_t* scales, const float* global_scale,
                                   int64_t rows, int64_t n, int kp, void* out, int out_type, void* stream) {
  const int64_t count = rows * (kp / 16);
  if (count == 0) return 0;
  auto* s = static_cast<cudaStream_t>(stream);
  const auto run = [&](auto* to) {
    dequantize_kernel<<<blocks_of(count), kThreads, 0, s>>>(packed, scales, global_scale, count, n, kp, to);
  };
  switch (out_type) {
    case 0:
      run(static_cast<float*>(out));
      break;
    case 1:
      run(static_cast<__nv_bfloat16*>(out));
      break;
    case 2:
      run(static_cast<__half*>(out));
      break;
    case 3:
      run(static_cast<double*>(out));
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}
