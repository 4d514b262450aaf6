// Expands NVFP4 weights of layout sm90 into bf16 or fp16 fragments of wgmma's A operand: e2m1 x scale is
// exact.
//
// Instruction j of a half step takes the 16 K of scale block j, so the activations stay in their plain order;
// its A operand wants from lane t of a quad K 2t, 2t+1, 2t+8, 2t+9. The layout gave block j to lane j, so
// each lane reads what the whole quad owns, a broadcast, and picks its byte: the magnitudes of those four
// codes are byte t of the block's two words. Tables of the eight magnitudes' high and low bytes (fp16: the
// low ones are zero) expand them four at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "ptx.cuh"

namespace fp4::sm90 {

// What lane t of a quad takes out of a block, whichever lane owns it.
template <Element kElement>
class BlockExpander {
 public:
  __host__ __device__ __forceinline__ void init(int t) {
    const int pair = 2 * (t % 2);
    code_selector_ = t | (t + 4) << 4;
    sign_selector_ = pair | (pair + 1) << 4 | (pair + 4) << 8 | (pair + 5) << 12;
    sign_shift_ = t / 2 * 4;
  }

  // The A operand of one instruction. `codes`: of the block, even row s = 0, 1, odd row s = 0, 1; `even`,
  // `odd`: words whose lowest byte is the rows' block scale.
  __host__ __device__ __forceinline__ void fragment(uint4 codes, uint32_t even, uint32_t odd,
                                                    uint32_t* a) const {
    expand(codes.x, codes.y, scale_pair(even), a[0], a[2]);
    expand(codes.z, codes.w, scale_pair(odd), a[1], a[3]);
  }

 private:
  static constexpr bool kBfloat = kElement == Element::kBfloat16;

  // A block scale, twice, from its e4m3 byte: exponent and mantissa moved into place (subnormals too) and
  // multiplied by the power of two between the formats' exponent biases.
  static __host__ __device__ __forceinline__ uint32_t scale_pair(uint32_t byte) {
    const uint32_t plain = byte & 0x7F;
    return kBfloat ? multiply(plain * 0x00100010u, 0x7B807B80u) : multiply(plain * 0x00800080u, 0x5C005C00u);
  }

  static __host__ __device__ __forceinline__ uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product;
#ifdef __CUDA_ARCH__
    if constexpr (kBfloat) {
      asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    } else {
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    }
#else
    using Pair = std::conditional_t<kBfloat, __nv_bfloat162, __half2>;
    const Pair both = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
    memcpy(&product, &both, sizeof(product));
#endif
    return product;
  }

  // Four weights from the two words of a row's block: K 2t, 2t + 1 and K 2t + 8, 2t + 9.
  __host__ __device__ __forceinline__ void expand(uint32_t word0, uint32_t word1, uint32_t scale,
                                                  uint32_t& first, uint32_t& second) const {
    const uint32_t codes = permute_bytes(word0, word1, code_selector_) & 0x7777;
    const uint32_t signs = permute_bytes(word0, word1, sign_selector_) << sign_shift_ & 0x80808080u;
    if constexpr (kBfloat) {  // 0, .5, 1, 1.5, 2, 3, 4, 6 are 0000 3F00 3F80 3FC0 4000 4040 4080 40C0
      const uint32_t high = permute_bytes(0x3F3F3F00u, 0x40404040u, codes) | signs;
      const uint32_t low = permute_bytes(0xC0800000u, 0xC0804000u, codes);
      first = multiply(permute_bytes(low, high, 0x5140), scale);
      second = multiply(permute_bytes(low, high, 0x7362), scale);
    } else {  // 0000 3800 3C00 3E00 4000 4200 4400 4600
      const uint32_t high = permute_bytes(0x3E3C3800u, 0x46444240u, codes) | signs;
      first = multiply(permute_bytes(high, 0, 0x1404), scale);
      second = multiply(permute_bytes(high, 0, 0x3424), scale);
    }
  }

  uint32_t code_selector_, sign_selector_, sign_shift_;
};

// The weights of one warp as operand A: four K = 16 instructions a half step.
template <Element kElement_>
class ExpandedWeights {
 public:
  static constexpr Element kElement = kElement_;
  static constexpr int kInstructions = 4, kTileScales = 128, kGroup = 0;
  static constexpr float kFactor = 1.0f;
  using Fragments = uint32_t[4 * kInstructions];
  struct Prepared {
    uint4 codes[4];  // of each block of the half step
  };

  // `codes` and `scales`: shared memory addresses of the warp's 16 rows in stage 0.
  __device__ __forceinline__ void init(uint32_t codes, uint32_t scales, int lane) {
    quad_codes_ = codes + lane / 4 * 64;
    quad_scales_ = scales + lane / 4 * 16;
    expander_.init(lane % 4);
  }

  __device__ __forceinline__ void load(uint32_t codes_offset, uint32_t scales_offset) {
    codes_ = quad_codes_ + codes_offset;
    const uint4 scales = load_shared_16(quad_scales_ + scales_offset);
    scales_[0] = scales.x;
    scales_[1] = scales.y;
    scales_[2] = scales.z;
    scales_[3] = scales.w;
  }

  template <int Half>
  __device__ __forceinline__ Prepared prepare() const {
    Prepared prepared;
#pragma unroll
    for (int block = 0; block < 4; ++block)
      prepared.codes[block] = load_shared_16(codes_ + Half * 512 + block * 16);
    return prepared;
  }

  template <int Half>
  __device__ __forceinline__ void finish(const Prepared& prepared, Fragments& fragments) const {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      expander_.fragment(prepared.codes[block], scales_[block] >> (16 * Half),
                         scales_[block] >> (16 * Half + 8), fragments + 4 * block);
    }
  }

 private:
  uint32_t quad_codes_, quad_scales_, codes_;
  BlockExpander<kElement> expander_;
  uint32_t scales_[4];
};

}  // namespace fp4::sm90
