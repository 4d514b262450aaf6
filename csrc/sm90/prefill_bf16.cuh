// Decodes weights of layout mma_bf16 to bf16 fragments of wgmma's A operand. Activations stay in plain order
// and need no kernel that reorders them.
//
// Instruction b of a half step multiplies block b of its 64 K. Lane t of a quad has codes 2t, 2t + 1, 2t + 8
// and 2t + 9 of that block. They are word t of the layout's lane that has blocks b and b + 1 (b even) of both
// of its rows. All four lanes need the scales of all blocks.
#pragma once

#include <type_traits>

#include "../device/e2m1_mma_bf16.cuh"
#include "../device/warp.cuh"

namespace fp4::sm90 {

using namespace device;

template <int kScaleBlock>
class Bf16Weights {
  using Words = Bf16Words<kScaleBlock>;

 public:
  static constexpr Element kElement = Words::kElement;
  static constexpr int kInstructions = 4, kTileScales = sm90_scales(128, kScaleBlock);
  static constexpr float kFactor = Words::kFactor;
  using Fragments = uint32_t[4 * kInstructions];
  struct Prepared {
    typename Words::Scales pair[2];  // scales of blocks 2i and 2i + 1 of the half step
  };

  // In 16 rows by 128 k: the offset of this lane's word in lane i of the layout, and of the scales of the
  // layout's four lanes.
  static __host__ __device__ __forceinline__ int word_at(int lane, int i) {
    return int(Sm90Lane{MmaBf16::slot(lane / 4, i) * 16, 0}.word(lane % 4));
  }
  static __host__ __device__ __forceinline__ int scales_at(int lane) {
    return Words::scales_at(lane / 4 * 4);
  }

  // The scale bytes of the layout's four lanes.
  using Scales = std::conditional_t<kScaleBlock == 16, uint4, uint2>;

  template <int Half>
  static __host__ __device__ __forceinline__ Prepared decode(const Scales& scales, const Words& words = {}) {
    if constexpr (kScaleBlock == 16) {
      return {{words.decode_scales(Half == 0 ? scales.x : scales.z),
               words.decode_scales(Half == 0 ? scales.y : scales.w)}};
    } else {
      const uint32_t half = Half == 0 ? scales.x : scales.y;
      return {{words.template decode_scales<0>(half), words.template decode_scales<2>(half)}};
    }
  }

  // `codes` and `scales`: the byte offsets of the warp's 16 rows in a stage.
  __device__ __forceinline__ void init(uint32_t codes, uint32_t scales, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) lane_words_[i] = kept_address(codes + word_at(lane, i), lane);
    lane_scales_ = kept_address(scales + scales_at(lane), lane);
    words_.keep_constants(lane);
  }

  __device__ __forceinline__ void load(uint32_t stage) {
    if constexpr (kScaleBlock == 16) {
      scales_ = load_shared_16(lane_scales_ + stage);
    } else {
      scales_ = load_shared_8(lane_scales_ + stage);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) codes_[i] = load_shared_8(lane_words_[i % 2] + stage + kSlots * (i / 2));
  }

  template <int Half>
  __device__ __forceinline__ Prepared prepare() const {
    return decode<Half>(scales_, words_);
  }

  template <int Half>
  __device__ __forceinline__ void finish(const Prepared& scales, Fragments& fragments) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2& word = codes_[2 * Half + i];
      Words::dequantize(word.x, word.y, scales.pair[i],
                        reinterpret_cast<uint32_t (&)[2][4]>(fragments[8 * i]));
    }
  }

 private:
  // The distance from the slot of the layout's lane i to that of lane i + 2.
  static constexpr int kSlots = 16 * (MmaBf16::slot(0, 2) - MmaBf16::slot(0, 0));

  uint32_t lane_words_[2], lane_scales_;
  uint2 codes_[4];
  Scales scales_;
  Words words_;
};

}  // namespace fp4::sm90
