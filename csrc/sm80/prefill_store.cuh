// Stores a tile's sums: scales them, adds the bias, applies the gate, and writes the results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "prefill_config.cuh"

namespace fp4::sm80 {

// The sums of a warp. Of each 16 rows and eight tokens, lane 4g + t has rows 2g (x, y) and 2g + 1 (z, w) for
// tokens 2t and 2t + 1.
template <class Config>
struct WarpSums {
  static constexpr int kEights = Config::WarpTokens / 8;
  float4 tile[Config::TilesM][kEights];
};

// Rounds a pair to `type`, one of the two 16-bit types. The type is chosen here at run time, because the
// epilogue is long and one copy of it serves both.
__device__ __forceinline__ uint32_t round_pair(float a, float b, DType type) {
  const __half2 halves = __floats2half2_rn(a, b);
  const __nv_bfloat162 others = __floats2bfloat162_rn(a, b);
  return type == DType::kFloat16 ? reinterpret_cast<const uint32_t&>(halves)
                                 : reinterpret_cast<const uint32_t&>(others);
}

// The destinations of a lane's results, and their factors.
template <class Config, bool kGated>
class TileStore {
 public:
  __device__ __forceinline__ TileStore(const Problem& problem, const TileInfo& tile)
      : problem_(problem), tile_(tile) {
    const int warp = threadIdx.x / kWarp;
    row_ = tile.column + warp % Config::WarpsM * (Config::TilesM * kTileRows);
    tokens_ = tile.width / Config::WarpsN;
    token_ = warp / Config::WarpsM * tokens_ + threadIdx.x % 4 * 2;
    factor_ = Config::Words::kFactor *
              (problem.global_scale == nullptr ? 1.f : __ldg(problem.global_scale + tile.group));
#pragma unroll
    for (int m = 0; m < Config::TilesM; ++m) {
      const int row = lane_row(m);
      bias_[m] = make_float2(0.f, 0.f);
      if (problem.bias != nullptr && row < problem.n) {
        const int64_t at = int64_t(tile.group) * problem.n + row;
        bias_[m] = make_float2(load_as_float(problem.bias, at, problem.bias_type),
                               load_as_float(problem.bias, at + 1, problem.bias_type));
      }
    }
  }

  __device__ __forceinline__ void store(const WarpSums<Config>& sums) const {
    if constexpr (kGated) {
      store_gated(sums);
    } else if (problem_.out_type == DType::kFloat32) {
      store_plain<float2>(sums);
    } else {
      store_plain<uint32_t>(sums);
    }
  }

 private:
  __device__ __forceinline__ int lane_row(int m) const {
    return row_ + m * kTileRows + threadIdx.x % kWarp / 4 * 2;
  }

  // Calls f(token in the tile, the scales of this token and the next, j) for every eight tokens of the warp.
  template <class F>
  __device__ __forceinline__ void for_eights(const F& f) const {
#pragma unroll
    for (int j = 0; j < WarpSums<Config>::kEights; ++j) {
      if (8 * j >= tokens_) break;
      const int token = token_ + 8 * j;
      float2 scale = make_float2(factor_, factor_);
      if (problem_.x_scale != nullptr) {
        if (token < tile_.rows) scale.x *= __ldg(problem_.x_scale + tile_.row + token);
        if (token + 1 < tile_.rows) scale.y *= __ldg(problem_.x_scale + tile_.row + token + 1);
      }
      f(token, scale, j);
    }
  }

  // Word: two neighbouring rows of the weight, which are neighbouring columns of the output.
  template <class Word>
  __device__ __forceinline__ void store_plain(const WarpSums<Config>& sums) const {
    for_eights([&](int token, float2 scale, int j) {
      auto* const out =
          static_cast<Word*>(problem_.out) + ((int64_t(tile_.row) + token) * problem_.n + lane_row(0)) / 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (token + e >= tile_.rows) continue;
        const float s = e ? scale.y : scale.x;
#pragma unroll
        for (int m = 0; m < Config::TilesM; ++m) {
          if (row_ + m * kTileRows >= problem_.n) continue;
          const float4& d = sums.tile[m][j];
          const float even = (e ? d.y : d.x) * s + bias_[m].x, odd = (e ? d.w : d.z) * s + bias_[m].y;
          Word word;
          if constexpr (std::is_same_v<Word, float2>) {
            word = make_float2(even, odd);
          } else {
            word = round_pair(even, odd, problem_.out_type);
          }
          out[e * (problem_.n / 2) + m * (kTileRows / 2)] = word;
        }
      }
    });
  }

  // Rows 2i and 2i + 1 are gate and up of column i, so a lane has one column of each 16 rows. Two
  // neighbouring lanes exchange columns: one then stores two columns of the even row tile, the other two
  // columns of the odd one.
  __device__ __forceinline__ void store_gated(const WarpSums<Config>& sums) const {
    static_assert(Config::TilesM % 2 == 0);
    const int g = threadIdx.x % kWarp / 4, odd = g % 2;
    for_eights([&](int token, float2 scale, int j) {
      float2 gate[Config::TilesM], up[Config::TilesM];
#pragma unroll
      for (int m = 0; m < Config::TilesM; ++m) {
        const float4& d = sums.tile[m][j];
        gate[m] = make_float2(d.x * scale.x + bias_[m].x, d.y * scale.y + bias_[m].x);
        up[m] = make_float2(d.z * scale.x + bias_[m].y, d.w * scale.y + bias_[m].y);
      }
      if (problem_.gate.limit > 0.f) {
        silu_values<true>(problem_.gate, gate, up);
      } else {
        silu_values<false>(problem_.gate, gate, up);
      }
#pragma unroll
      for (int m = 0; m < Config::TilesM; m += 2) {
        const int row = row_ + (m + odd) * kTileRows;
        auto* const out = static_cast<uint32_t*>(problem_.out) +
                          ((int64_t(tile_.row) + token) * (problem_.n / 2) + row / 2 + (g - odd)) / 2;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float even_tile = e ? up[m].y : up[m].x, odd_tile = e ? up[m + 1].y : up[m + 1].x;
          const float other = __shfl_xor_sync(~0u, odd ? even_tile : odd_tile, 4);
          const uint32_t pair =
              round_pair(odd ? other : even_tile, odd ? odd_tile : other, problem_.out_type);
          if (token + e < tile_.rows && row < problem_.n) out[e * (problem_.n / 4)] = pair;
        }
      }
    });
  }

  const Problem& problem_;
  const TileInfo& tile_;
  int row_, token_, tokens_;  // first row of the warp; first token of this lane; number of tokens of the warp
  float factor_;
  float2 bias_[Config::TilesM];
};

template <class Config, bool kGated>
__device__ __forceinline__ void store_tile(const Problem& problem, const TileInfo& tile,
                                           const WarpSums<Config>& sums) {
  TileStore<Config, kGated>(problem, tile).store(sums);
}

}  // namespace fp4::sm80
