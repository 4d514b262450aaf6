// The products of int8 rows: a warp's share of a step of 128 K. First it decodes all of its weights of the
// step into registers. Then it sums integers for each 16 tokens. The sums begin at the bits of 1.5 x 2^23;
// their final bits are therefore those of the float32 number 1.5 x 2^23 + sum.
#pragma once

#include "prefill_products.cuh"

namespace fp4::sm80 {

template <class Config>
class Int8Products {
 public:
  using Sums = WarpSums<Config>;

  __device__ __forceinline__ explicit Int8Products(SharedStorage<Config>& shared) : shared_(shared) {}

  __device__ __forceinline__ void keep_constants() { words_.keep_constants(threadIdx.x % kWarp); }

  // Decodes the weights of the first step. After the last tile these are leftovers in shared memory, which
  // nobody uses.
  __device__ __forceinline__ void begin() {
    copy_wait<Config::Pending>();
    __syncthreads();
    load_raw();
    decode();
  }

  // `copy`: PrefillBlock::copy_part.
  template <int Width, class Copy>
  __device__ __forceinline__ void step(Sums& sums, const Copy& copy) {
    static_assert(Width % (16 * Config::WarpsN) == 0);
    constexpr int kTokens = Width / Config::WarpsN;
    copy_wait<Config::Pending>();
    __syncthreads();
    copy(std::integral_constant<int, 0>());
    const uint32_t x = smem_address(shared_.x[x_slot_]) + x_place<Config, Width>();
    const uint32_t scales = smem_address(shared_.x_scale[x_slot_]) +
                            (warp_n<Config>() * kTokens + threadIdx.x % 4 * 2) * sizeof(float);
    stage_ = stage_ + 1 == Config::Stages ? 0 : stage_ + 1;
#pragma unroll
    for (int p = 0; p < kTokens / 16; ++p) {
      if (p + 1 == kTokens / 16) load_raw();
      multiply_16(sums, x + p * 16 * kXRowBytes, scales + p * 16 * sizeof(float), p);
    }
    decode();
    x_slot_ = x_slot_ + 1 == Config::XSlots ? 0 : x_slot_ + 1;
  }

 private:
  using Words = typename Config::Words;

  static constexpr int kBegin = 0x4B400000;  // 1.5 x 2^23

  // Loads a lane's codes and the bytes of its scales for the next step.
  __device__ __forceinline__ void load_raw() {
    const int g = threadIdx.x % kWarp / 4;
    const auto [codes, scales] = weight_places(shared_, stage_);
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
#pragma unroll
      for (int i = 0; i < Words::kWords; ++i)
        codes_[m][i] =
            load_shared_8(codes + MmaBf16::slot(g, i % 2) * 16 + m * kTileCodes + i / 2 * kNextCodes);
#pragma unroll
      for (int i = 0; i < Words::kScaleWords; i += 2) {
        const uint2 both = load_shared_8(scales + m * Config::TileScales + i * 4);
        scales_[m][i] = both.x, scales_[m][i + 1] = both.y;
      }
    }
  }

  __device__ __forceinline__ void decode() {
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
      typename Words::Rows rows;
      words_.decode_scales(scales_[m], rows);
#pragma unroll
      for (int i = 0; i < Words::kWords; ++i) Words::quantize(codes_[m][i], rows.factor[i], fragments_[m][i]);
      steps_[m][0] = rows.step[0], steps_[m][1] = rows.step[1];
    }
  }

  // Multiplies the `p`-th 16 tokens of the warp. `x` and `scales` are the addresses of their X and scales for
  // this lane.
  __device__ __forceinline__ void multiply_16(Sums& sums, uint32_t x, uint32_t scales, int p) {
    int sum[Config::TilesM][2][4];
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[m][i / 4][i % 4] = kBegin;
    }
#pragma unroll
    for (int i = 0; i < Words::kWords; ++i) {
      uint32_t b[4];
      load_matrices(x ^ (i * 2 * kPiece), b);
#pragma unroll
      for (int m = 0; m < Config::TilesM; ++m) {
        mma_int8(sum[m][0], fragments_[m][i], b[0], b[1]);
        mma_int8(sum[m][1], fragments_[m][i], b[2], b[3]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2 token = load_shared_pair(scales + e * 8 * sizeof(float));
#pragma unroll
      for (int m = 0; m < Config::TilesM; ++m) {
        const int (&d)[4] = sum[m][e];
        const auto [even, odd] = steps_[m];
        float4& to = sums.tile[m][2 * p + e];
        to.x += count(d[0]) * (even * token.x), to.y += count(d[1]) * (even * token.y);
        to.z += count(d[2]) * (odd * token.x), to.w += count(d[3]) * (odd * token.y);
      }
    }
  }

  static __device__ __forceinline__ float count(int sum) {
    return __int_as_float(sum) - __int_as_float(kBegin);
  }

  SharedStorage<Config>& shared_;
  Words words_;
  uint2 codes_[Config::TilesM][Words::kWords];
  uint32_t scales_[Config::TilesM][Words::kScaleWords];
  uint32_t fragments_[Config::TilesM][Words::kWords][4];
  float steps_[Config::TilesM][2];  // step sizes of a lane's rows
  int x_slot_ = 0, stage_ = 0;
};

}  // namespace fp4::sm80
