// The products of 16-bit rows: a warp's share of a step of 128 K, in two halves.
#pragma once

#include <type_traits>

#include "prefill_config.cuh"
#include "prefill_store.cuh"
#include "ptx_sm80.cuh"

namespace fp4::sm80 {

template <class Config>
__device__ __forceinline__ int warp_m() {
  return threadIdx.x / kWarp % Config::WarpsM;
}
template <class Config>
__device__ __forceinline__ int warp_n() {
  return threadIdx.x / kWarp / Config::WarpsM;
}

// The address offset at which this lane reads a fragment of X: token l % 8 of one of the two eights of 16
// tokens, and one of the two halves of 32 bytes, swizzled.
template <class Config, int Width>
__device__ __forceinline__ uint32_t x_place() {
  const int lane = threadIdx.x % kWarp, token = lane / 16 * 8 + lane % 8;
  return (warp_n<Config>() * (Width / Config::WarpsN) + token) * kXRowBytes +
         ((lane / 8 % 2) ^ (lane % 8)) * kPiece;
}

// The addresses at which this lane reads its warp's codes (without their slots) and scales in a stage.
struct WeightPlaces {
  uint32_t codes, scales;
};
template <class Config>
__device__ __forceinline__ WeightPlaces weight_places(SharedStorage<Config>& shared, int stage) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  return {smem_address(shared.codes[stage]) + warp_m<Config>() * Config::TilesM * kTileCodes + t / 2 * 512 +
              t % 2 * 8,
          smem_address(shared.scales[stage]) + warp_m<Config>() * Config::TilesM * Config::TileScales +
              g * (Config::TileScales / 8)};
}
// The offset of the codes of the next 64 K.
constexpr int kNextCodes = 16 * (MmaBf16::slot(0, 2) - MmaBf16::slot(0, 0));

template <class Config>
class HalfProducts {
 public:
  using Sums = WarpSums<Config>;

  __device__ __forceinline__ explicit HalfProducts(SharedStorage<Config>& shared) : shared_(shared) {}

  __device__ __forceinline__ void keep_constants() { words_.keep_constants(threadIdx.x % kWarp); }

  // Decodes the weights of the first half step. After the last tile these are leftovers in shared memory,
  // which nobody uses.
  __device__ __forceinline__ void begin() {
    copy_wait<Config::Pending>();
    __syncthreads();
    load_raw<0>(0);
    decode<0>(first_);
    load_early();
  }

  // `copy`: PrefillBlock::copy_part.
  template <int Width, class Copy>
  __device__ __forceinline__ void step(Sums& sums, const Copy& copy) {
    half_step<Width, 0>(sums, copy);
    half_step<Width, 1>(sums, copy);
  }

 private:
  using Words = typename Config::Words;

  // For a warp's rows and 64 K: a lane's codes and the bytes of its scales.
  struct Raw {
    uint2 codes[Config::TilesM][2];
    uint32_t scales[Config::TilesM][2];
  };
  // For 32 K: operands A of two products for each 16 rows.
  using Fragments = uint32_t[Config::TilesM][2][4];

  // Loads half `kHalf` of the step in `stage`.
  template <int kHalf>
  __device__ __forceinline__ void load_raw(int stage) {
    const int g = threadIdx.x % kWarp / 4;
    const auto [codes, scales] = weight_places(shared_, stage);
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        raw_.codes[m][i] =
            load_shared_8(codes + MmaBf16::slot(g, i) * 16 + m * kTileCodes + kHalf * kNextCodes);
      if constexpr (Config::TileScales == 128) {
        const uint2 both = load_shared_8(scales + m * Config::TileScales + kHalf * 8);
        raw_.scales[m][0] = both.x, raw_.scales[m][1] = both.y;
      } else {
        raw_.scales[m][0] = load_shared_4(scales + m * Config::TileScales + kHalf * 4);
      }
    }
  }

  // Decodes the `i`-th 32 K of the loaded half.
  template <int i>
  __device__ __forceinline__ void decode(Fragments& fragments) {
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
      typename Words::Scales scales;
      if constexpr (Config::TileScales == 128) {
        scales = words_.decode_scales(raw_.scales[m][i]);
      } else {
        scales = words_.template decode_scales<2 * i>(raw_.scales[m][0]);
      }
      const uint2 word = raw_.codes[m][i];
      Words::dequantize(word.x, word.y, scales, fragments[m]);
    }
  }

  // Multiplies the `i`-th 32 K of the half step. `x` is the address of its X for this lane (see x_place).
  template <int Width, int i>
  __device__ __forceinline__ void multiply_32(Sums& sums, const Fragments& fragments, uint32_t x) {
    static_assert(Width % (16 * Config::WarpsN) == 0);
    constexpr int kPairs = Width / Config::WarpsN / 16;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t at = x ^ ((2 * i + c) * 2 * kPiece);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        uint32_t b[4];
        if (i == 0 && c == 0 && p < Config::EarlyPairs) {
#pragma unroll
          for (int j = 0; j < 4; ++j) b[j] = early_[p][j];
        } else {
          load_matrices(at + p * 16 * kXRowBytes, b);
        }
#pragma unroll
        for (int m = 0; m < Config::TilesM; ++m) {
          mma<Words::kElement>(sums.tile[m][2 * p], fragments[m][c], b[0], b[1]);
          mma<Words::kElement>(sums.tile[m][2 * p + 1], fragments[m][c], b[2], b[3]);
        }
      }
    }
  }

  template <int Width, int kHalf, class Copy>
  __device__ __forceinline__ void half_step(Sums& sums, const Copy& copy) {
    copy_wait<Config::Pending>();
    __syncthreads();
    copy(std::integral_constant<int, kHalf>());
    const uint32_t x = smem_address(shared_.x[x_slot_]) + x_place<Config, Width>();
    Fragments second;
    decode<1>(second);
    multiply_32<Width, 0>(sums, first_, x);
    if constexpr (kHalf == 1) stage_ = stage_ + 1 == Config::Stages ? 0 : stage_ + 1;
    load_raw<1 - kHalf>(stage_);
    decode<0>(first_);
    multiply_32<Width, 1>(sums, second, x);
    x_slot_ = x_slot_ + 1 == Config::XSlots ? 0 : x_slot_ + 1;
    load_early();
  }

  // Loads the X that the next half step multiplies first.
  __device__ __forceinline__ void load_early() {
    const uint32_t x = smem_address(shared_.x[x_slot_]) + x_place<Config, Config::MaxTokens>();
#pragma unroll
    for (int p = 0; p < Config::EarlyPairs; ++p) load_matrices(x + p * 16 * kXRowBytes, early_[p]);
  }

  SharedStorage<Config>& shared_;
  Words words_;
  Raw raw_;
  Fragments first_;  // of the next 32 K
  uint32_t early_[Config::EarlyPairs > 0 ? Config::EarlyPairs : 1][4];
  int x_slot_ = 0, stage_ = 0;
};

}  // namespace fp4::sm80
