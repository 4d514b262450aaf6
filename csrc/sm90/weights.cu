// Weights into and out of layouts sm90 and sm90_bf16, on the device. The order is that of
// csrc/cpu/sm90_layout.h: a lane (g, t) of a warp owns, of a tile of 16 rows by 64 k, the scale block t of
// rows 2g and 2g + 1. A plain C interface, so that nothing here knows torch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

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

// Where the bits of code k of a block are, of its 64: bits 0 to 2 are the magnitude, 3 is the sign.
struct Sm90Bits {
  static __device__ int at(int k, int bit) {
    const int word = k / 8 * 32;
    return bit < 3 ? word + k % 8 / 4 * 16 + k % 4 * 4 + bit : word + k % 4 * 8 + (k % 8 / 4 == 0 ? 7 : 3);
  }
  static __device__ uint8_t encode_scale(uint8_t e4m3) {
    const int mantissa = e4m3 & 7;
    return e4m3 | (mantissa == 0 || mantissa == 7 ? 0x80 : 0);
  }
  static __device__ float scale(uint8_t byte) {
    __nv_fp8_e4m3 s;
    s.__x = byte & 0x7F;
    return float(s);
  }
};

// A block whose scale is zero has zero codes.
struct Bf16Bits {
  static __device__ int at(int k, int bit) {
    constexpr uint32_t kRotations = 0xEC628A40;  // left, of the field 4 (k / 8) + 2 (k / 4 % 2) + k % 2
    const int field = k / 4 * 2 + k % 2, left = kRotations >> (4 * field) & 15;
    const int place = ((bit < 3 ? 6 + bit : 15) + 16 * (k / 2 % 2) - left) & 31;
    const bool second = field % 4 == 3 ? (0x0603 >> (place % 16) & 1) == 0 : field > 3;
    return place + (second ? 32 : 0);
  }
  static __device__ uint8_t encode_scale(uint8_t e4m3) {
    const int shift = (e4m3 & 0x78) == 0 && e4m3 != 0 ? __clz(e4m3) - 28 : 0;  // subnormal: up to 2^-6
    const int exponent = shift > 0 ? 4 - shift : (e4m3 >> 3) + 3;
    return e4m3 == 0 ? 0 : uint8_t(exponent << 3 | (e4m3 << shift & 7));
  }
  static __device__ float scale(uint8_t byte) {
    return byte == 0 ? 0.f : __uint_as_float(uint32_t((byte >> 3) + 117) << 23 | (byte & 7) << 20);
  }
};

template <class Bits>
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
  const uint8_t held = Bits::encode_scale(scale);
  if (held == 0) codes = 0;
  uint64_t words = 0;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int bit = 0; bit < 4; ++bit) words |= (codes >> (4 * j + bit) & 1) << Bits::at(j, bit);
  }
  *reinterpret_cast<uint64_t*>(to_packed + at.code) = words;
  to_scales[at.scale] = held;
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
template <class Bits, typename T>
__global__ void dequantize_kernel(const uint8_t* packed, const uint8_t* scales, const float* global_scale,
                                  int64_t count, int64_t n, int kp, T* out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const Place at(i, kp);
  const uint64_t words = *reinterpret_cast<const uint64_t*>(packed + at.code);
  const float scale = Bits::scale(scales[at.scale]);
  const float factor = global_scale[at.matrix_row / n];
  alignas(16) T v[16];
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    uint32_t m = 0;
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) m |= (words >> Bits::at(j, bit) & 1) << bit;
    // Arithmetic instead of a table in memory: e2m1 is 0.5 * m below 2, else (2 + m % 2) * 2^(m / 2 - 2).
    const float magnitude = m < 4 ? 0.5f * m : (2 + (m & 1)) * (m < 6 ? 1.f : 2.f);
    const float value = magnitude * scale;
    const bool negative = words >> Bits::at(j, 3) & 1;
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

// packed [rows, k / 2] and e4m3 scales [rows, k / 16] in plain order, rows over all matrices, to layout sm90,
// or sm90_bf16.
extern "C" int fp4_sm90_pack(const uint8_t* packed, const uint8_t* scales, int64_t rows, int k, int kp,
                             int bf16_words, uint8_t* to_packed, uint8_t* to_scales, void* stream) {
  const int64_t count = rows * (kp / 16);
  if (count == 0) return 0;
  auto* kernel = bf16_words ? pack_kernel<Bf16Bits> : pack_kernel<Sm90Bits>;
  kernel<<<blocks_of(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(packed, scales, count, k, kp,
                                                                               to_packed, to_scales);
  return cudaGetLastError();
}

// A layout to values [rows, kp]; out_type: 0 float32, 1 bfloat16, 2 float16, 3 float64; n rows a matrix.
extern "C" int fp4_sm90_dequantize(const uint8_t* packed, const uint8_t* scales, const float* global_scale,
                                   int64_t rows, int64_t n, int kp, int bf16_words, void* out, int out_type,
                                   void* stream) {
  const int64_t count = rows * (kp / 16);
  if (count == 0) return 0;
  auto* s = static_cast<cudaStream_t>(stream);
  const auto run = [&](auto* to) {
    using T = std::remove_pointer_t<decltype(to)>;
    auto* kernel = bf16_words ? dequantize_kernel<Bf16Bits, T> : dequantize_kernel<Sm90Bits, T>;
    kernel<<<blocks_of(count), kThreads, 0, s>>>(packed, scales, global_scale, count, n, kp, to);
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
