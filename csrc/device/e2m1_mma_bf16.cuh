// Decodes weights of layout mma_bf16 to bf16, or to fp16 for fp16 rows. Eight codes take 12 instructions
// to bf16 (15 in e2m1_sm90.cuh) and 20 to fp16. e2m1 x e4m3 is exact in both.
//
// If a code's sign is in bit 15 of a half word and its magnitude in bits 8 to 6, the half word read as bf16
// is the code x 2^-126. This holds for subnormal codes, too. A word of 64 bits holds eight pairs of codes, as
// the products read them. A rotation of one of its 32-bit halves brings a pair to these bits; this gives six
// of the pairs. The bits that are left of both halves, put together, hold the other two. The scales have a
// factor of 2^119 to make up for 2^-126; with scales up to 448 this does not overflow. With the magnitude
// three bits higher, the half word read as fp16 is the code x 2^-14, and the scales have a factor of 2^7.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../common/sm90_layout.h"
#include "bytes.cuh"
#include "types.cuh"
#include "warp.cuh"

namespace fp4::device {

constexpr uint32_t kBf16Fields = 0x81C081C0, kFp16Fields = 0x8E008E00, kLeftOfLower = 0x06030603;
constexpr int kLowestField = 6;  // bit

// Takes the bits of kLeftOfLower from `lower` and the others from `upper`. This is one instruction, which the
// compiler does not find by itself, because each mask is a constant of its own.
__host__ __device__ __forceinline__ uint32_t left_of_fields(uint32_t lower, uint32_t upper) {
#ifdef __CUDA_ARCH__
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xE2;" : "=r"(result) : "r"(lower), "n"(kLeftOfLower), "r"(upper));
  return result;
#else
  return (lower & kLeftOfLower) | (upper & ~kLeftOfLower);
#endif
}

__host__ __device__ __forceinline__ uint32_t rotated_left(uint32_t word, int left) {
#ifdef __CUDA_ARCH__
  return __funnelshift_l(word, word, left);
#else
  return word << left | word >> (32 - left);
#endif
}

__host__ __device__ __forceinline__ __nv_bfloat162 low_twice(__nv_bfloat162 pair) {
  return __low2bfloat162(pair);
}
__host__ __device__ __forceinline__ __nv_bfloat162 high_twice(__nv_bfloat162 pair) {
  return __high2bfloat162(pair);
}
__host__ __device__ __forceinline__ half2 low_twice(half2 pair) { return __low2half2(pair); }
__host__ __device__ __forceinline__ half2 high_twice(half2 pair) { return __high2half2(pair); }

// kElement_: bf16 or fp16. kScaleBlock_: K that share a scale.
template <Element kElement_, int kScaleBlock_>
struct MmaWords {
  static constexpr Element kElement = kElement_;
  static constexpr int kScaleBlock = kScaleBlock_;
  static constexpr bool kBf16 = kElement == Element::kBFloat16;
  static constexpr float kFactor = 128.0f;  // 2^126 / 2^119, or 2^14 / 2^7
  using Layout = MmaBf16;
  using ScaleBytes = std::conditional_t<kScaleBlock == 16, uint32_t, uint16_t>;  // a lane's scales for 128 k
  static constexpr int kScaleSteps = 2;  // 64-steps that share a result of decode_scales
  static constexpr int kStepScales = sm90_scales(64, kScaleBlock);
  using Pair = std::conditional_t<kBf16, __nv_bfloat162, half2>;

  // Returns where a lane's scales of 16 rows by 128 k begin: four bytes, or two.
  static __host__ __device__ __forceinline__ int scales_at(int lane) { return lane * (64 / kScaleBlock); }

  // The scales of a lane's four blocks: row[r] has those of both blocks of row r.
  struct Scales {
    Pair row[2];
  };

  // Decodes scales from `bytes`, from byte kFirst on. A byte is {exponent + 10: 5 bits, mantissa: 3 bits}.
  template <int kFirst = 0>
  __host__ __device__ __forceinline__ Scales decode_scales(uint32_t bytes) const {
    constexpr uint32_t kSecond = kFirst + (kScaleBlock == 16 ? 2 : 0);  // of the even row
    constexpr uint32_t kEven = 0x4040 | kSecond << 8 | kFirst;          // each below a zero byte
    // A byte x 16 has a bf16's exponent and mantissa in place, a byte x 128 an fp16's. Adding kMore to the
    // exponent multiplies by the factor.
    constexpr uint32_t kMore = kBf16 ? 0x76007600 : 0x30003000;
    const uint32_t even = permute_bytes(bytes, 0, kEven) * place_ + kMore,
                   odd = permute_bytes(bytes, 0, kEven + 0x0101) * place_ + kMore;
    return {{reinterpret_cast<const Pair&>(even), reinterpret_cast<const Pair&>(odd)}};
  }

  // Decodes one word without scales: a[c] has four codes of block c of both rows, as a product's A operand.
  static __host__ __device__ __forceinline__ void codes(uint32_t lower, uint32_t upper, uint32_t (&a)[2][4]) {
    const uint32_t left = left_of_fields(lower, upper);
    a[0][0] = field(lower, 0), a[0][1] = field(lower, 4), a[0][2] = field(lower, 10);
    a[1][0] = field(upper, 2), a[1][1] = field(upper, 6), a[1][2] = field(upper, 12);
    a[0][3] = field(left, 8), a[1][3] = field(left, 14);
  }

  // Decodes one word and multiplies it by its scales.
  static __host__ __device__ __forceinline__ void dequantize(uint32_t lower, uint32_t upper,
                                                             const Scales& scales, uint32_t (&a)[2][4]) {
    codes(lower, upper, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair row = scales.row[i % 2], scale[2] = {low_twice(row), high_twice(row)};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Pair v = __hmul2(reinterpret_cast<const Pair&>(a[c][i]), scale[c]);
        a[c][i] = reinterpret_cast<const uint32_t&>(v);
      }
    }
  }

  static __host__ __device__ __forceinline__ uint32_t without_flags(uint32_t scales) { return scales; }

  // Decodes two words, as the decode and gemv kernels load them.
  static __host__ __device__ __forceinline__ void dequantize(const uint4& codes, const Scales& scales,
                                                             uint32_t (&a)[4][4]) {
    dequantize(codes.x, codes.y, scales, reinterpret_cast<uint32_t (&)[2][4]>(a[0]));
    dequantize(codes.z, codes.w, scales, reinterpret_cast<uint32_t (&)[2][4]>(a[2]));
  }

  // Keeps kPlace in a register, so that scales are multiplied into place: with a constant the compiler would
  // shift.
  __device__ __forceinline__ void keep_constants(int lane) { place_ = kept_constant(kPlace, lane); }

 private:
  static constexpr uint32_t kPlace = kBf16 ? 16 : 128;
  uint32_t place_ = kPlace;

  // Returns a pair of codes, rotated into place. If no field wraps around the word's end, a shift is enough,
  // which the compiler can replace by a multiplication. This has its own pipe; the pipe of logic instructions
  // is the busy one (h200_counters.txt).
  static __host__ __device__ __forceinline__ uint32_t field(uint32_t word, int left) {
    const uint32_t pair = (left <= kLowestField ? word << left : rotated_left(word, left)) & kBf16Fields;
    if constexpr (kBf16) return pair;
    return pair * 9 & kFp16Fields;  // adds the same bits three places higher; no two meet
  }
};

template <int kScaleBlock>
using Bf16Words = MmaWords<Element::kBFloat16, kScaleBlock>;
template <int kScaleBlock>
using Fp16Words = MmaWords<Element::kFloat16, kScaleBlock>;

}  // namespace fp4::device
