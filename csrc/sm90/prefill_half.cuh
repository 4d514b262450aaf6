// Decodes weights of layout sm90 to fp16 fragments of wgmma's A operand. Activations are in the order that
// the layout gives a lane. No lane needs codes or scales of another lane.
//
// In 64 K, lane t of a quad has block t: K 16t to 16t + 15. Instruction 2s + q of a half step takes the
// lane's codes 8s + 4q + i. Those with i = 0, 2 are the instruction's K 2t, 2t + 1; those with i = 1, 3 are
// its K 2t + 8, 2t + 9. Element 16t + 8s + 4q + i of the activations is therefore at 16 (2s + q) + 8 (i % 2)
// + 2t + i / 2 (half_position).
#pragma once

#include "../device/e2m1_sm90.cuh"
#include "../device/lane_codes.cuh"

namespace fp4::sm90 {

using namespace device;

// The weights of one warp as operand A: four K = 16 instructions for each half step.
template <int kScaleBlock>
class HalfWeights {
  using Words = HalfWords<kScaleBlock>;

 public:
  static constexpr Element kElement = Words::kElement;
  static constexpr int kInstructions = 4, kTileScales = sm90_scales(128, kScaleBlock);
  static constexpr float kFactor = Words::kFactor;
  using Fragments = uint32_t[4 * kInstructions];
  using Prepared = typename Words::Scales;

  // `codes` and `scales`: the byte offsets of the warp's 16 rows in a stage.
  __device__ __forceinline__ void init(uint32_t codes, uint32_t scales, int lane) {
    codes_.init(codes, lane);
    words_.keep_constants(lane);
    lane_scales_ = kept_address(scales + Words::scales_at(lane), lane);
  }

  __device__ __forceinline__ void load(uint32_t stage) {
    scales_ = Words::without_flags(load_shared_4(lane_scales_ + stage));
    codes_.load(stage);
  }

  template <int Half>
  __device__ __forceinline__ Prepared prepare() const {
    return Words::decode_scales(scales_ >> (16 * Half));
  }

  template <int Half>
  __device__ __forceinline__ void finish(const Prepared& scales, Fragments& fragments) const {
    words_.dequantize(codes_.half[Half], scales, reinterpret_cast<uint32_t (&)[kInstructions][4]>(fragments));
  }

 private:
  LaneCodes codes_;
  uint32_t lane_scales_, scales_;
  Words words_;
};

}  // namespace fp4::sm90
