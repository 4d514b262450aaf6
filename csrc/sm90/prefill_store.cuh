// Epilogue of a prefill tile: scales the sums, adds the bias, applies the gate, and stores.
//
// 16-bit results leave through shared memory, by bulk tensor copies that end at the group's last row (see
// store_boxes). float32 results are stored directly.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "prefill_config.cuh"

namespace fp4::sm90 {

// The epilogue of a consumer warp.
template <class Config, bool kGated>
class TileStore {
 public:
  __device__ __forceinline__ TileStore(SharedStorage<Config>& shared, const Problem& problem,
                                       const Maps& maps)
      : shared_(shared), problem_(problem), maps_(maps) {}

  // `slot`: the slot of the tile's token scales and bias.
  __device__ __forceinline__ void store(const float* sums, const TileInfo& tile, int slot) {
    const float* token_scale = shared_.token_scale[slot];
    int row = threadIdx.x / 4 * 2;  // this row and the next
    float2 bias = *reinterpret_cast<const float2*>(shared_.bias[slot] + row);
    int column = tile.column + threadIdx.x / kWarpgroup * kMmaRows;
    if (column < problem_.n) {
      switch (problem_.out_type) {
        case DType::kFloat32:
          if constexpr (!kGated) store_float32(sums, tile, token_scale, bias, tile.column + row);
          break;
        case DType::kBFloat16:
          store_rows<__nv_bfloat162>(sums, tile, token_scale, bias, column);
          break;
        default:
          store_rows<__half2>(sums, tile, token_scale, bias, column);
      }
    }
  }

  // Returns when all results have left shared memory.
  __device__ __forceinline__ void end() const { store_wait_read<0>(); }

 private:
  template <class Pair>
  __device__ __forceinline__ void store_rows(const float* sums, const TileInfo& tile,
                                             const float* token_scale, float2 bias, int column) {
    if constexpr (!kGated) {
      store_halves<Pair>(sums, tile, token_scale, bias, column);
    } else if (problem_.gate.limit > 0.0f) {
      store_gated<Pair, true>(sums, tile, token_scale, bias, column / 2);
    } else {
      store_gated<Pair, false>(sums, tile, token_scale, bias, column / 2);
    }
  }

  // Stores 16-bit results of all tokens x 64 weight rows, StoreTokens tokens at a time.
  template <class Pair>
  __device__ __forceinline__ void store_halves(const float* sums, const TileInfo& tile,
                                               const float* token_scale, float2 bias, int column) {
    int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    // This lane has token 8 j + 2 t + e and weight rows 16 warp + 2 g and the next. Pieces of 16 bytes are
    // swizzled by the token.
    int piece = 2 * warp + g / 4;
    int even = 2 * t * 128 + ((piece ^ (2 * t)) * 16) + g % 4 * 4;
    int odd = (2 * t + 1) * 128 + ((piece ^ (2 * t + 1)) * 16) + g % 4 * 4;
    store_boxes<Config::StoreTokens>(
        tile, column, token_scale, [&](int token, const float2(&scale)[kEights], uint8_t* rows) {
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            const float* d = sums + token / 2 + 4 * j;
            float2 one = make_float2(d[0] * scale[j].x + bias.x, d[2] * scale[j].x + bias.y);
            float2 two = make_float2(d[1] * scale[j].y + bias.x, d[3] * scale[j].y + bias.y);
            *reinterpret_cast<uint32_t*>(rows + j * 1024 + even) = round_pair<Pair>(one);
            *reinterpret_cast<uint32_t*>(rows + j * 1024 + odd) = round_pair<Pair>(two);
          }
        });
  }

  // The same for a gated activation. Gate and up are two rows of one lane, which leaves 32 columns, so twice
  // as many tokens are stored at a time.
  template <class Pair, bool kLimited>
  __device__ __forceinline__ void store_gated(const float* sums, const TileInfo& tile,
                                              const float* token_scale, float2 bias, int column) {
    int warp = threadIdx.x / kWarp % 4, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    // This lane has token 8 j + 2 t + e and column 8 warp + g. Pieces of 16 bytes are swizzled by t.
    int place = 2 * t * 64 + (warp ^ t) * 16 + g * 2;
    store_boxes<2 * Config::StoreTokens>(
        tile, column, token_scale, [&](int token, const float2(&scale)[kEights], uint8_t* rows) {
          float2 gate[kEights], up[kEights];
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            const float* d = sums + token / 2 + 4 * j;
            gate[j] = make_float2(d[0] * scale[j].x + bias.x, d[1] * scale[j].y + bias.x);
            up[j] = make_float2(d[2] * scale[j].x + bias.y, d[3] * scale[j].y + bias.y);
          }
          silu_values<kLimited>(problem_.gate, gate, up);
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            uint32_t pair = round_pair<Pair>(up[j]);
            *reinterpret_cast<uint16_t*>(rows + j * 512 + place) = static_cast<uint16_t>(pair);
            *reinterpret_cast<uint16_t*>(rows + j * 512 + place + 64) = static_cast<uint16_t>(pair >> 16);
          }
        });
  }

  // How many eights of tokens are scaled at a time.
  static constexpr int kEights = Config::MaxTokens % 32 == 0 ? 4 : 2;

  // Moves all tokens of the tile through two buffers of `kTokens` rows. store(token, scales of this lane's
  // pairs of tokens, place of the row of `token`) fills kEights x 8 rows. The map of the output has the rows
  // twice, as y and z: row r0 + i is (y, z) = (kTokens - count + i, r0 + count). y ends at kTokens, so
  // exactly `count` rows are written.
  template <int kTokens, class Store>
  __device__ __forceinline__ void store_boxes(const TileInfo& tile, int column, const float* token_scale,
                                              const Store& store) {
    constexpr int kBatch = 8 * kEights, kRowBytes = Config::StoreBytes / kTokens;
    static_assert(kTokens % kBatch == 0 && Config::MaxTokens % kBatch == 0);
    int warpgroup = threadIdx.x / kWarpgroup;
    bool leader = threadIdx.x % kWarpgroup == 0;
#pragma unroll
    for (int first = 0; first < Config::MaxTokens; first += kTokens) {
      if (first >= tile.rows) break;
      uint8_t* buffer = shared_.store[warpgroup][store_buffer_];
#pragma unroll
      for (int token = first; token < first + kTokens && token < Config::MaxTokens; token += kBatch) {
        // Read before the stores, because the compiler assumes that stores may change them.
        float2 scales[kEights];
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          scales[j] = *reinterpret_cast<const float2*>(token_scale + token + 8 * j + threadIdx.x % 4 * 2);
        }
        store(token, scales, buffer + (token - first) * kRowBytes);
      }
      fence_async_proxy();
      if (leader) store_wait_read<0>();  // after the barrier the other buffer is free
      named_barrier(1 + warpgroup, kWarpgroup);
      if (leader) {
        int count = min(kTokens, tile.rows - first);
        store_box(&maps_.out, smem_address(buffer), column, kTokens - count, tile.row + first + count);
        store_commit();
      }
      store_buffer_ ^= 1;
    }
  }

  template <class Pair>
  static __device__ __forceinline__ uint32_t round_pair(float2 values) {
    Pair pair;
    if constexpr (std::is_same_v<Pair, __half2>) {
      pair = __float22half2_rn(values);
    } else {
      pair = __float22bfloat162_rn(values);
    }
    return *reinterpret_cast<uint32_t*>(&pair);
  }

  __device__ __forceinline__ void store_float32(const float* sums, const TileInfo& tile,
                                                const float* token_scale, float2 bias, int column) {
    int lane = threadIdx.x % kWarp;
    float* out = static_cast<float*>(problem_.out) + static_cast<int64_t>(tile.row) * problem_.n + column;
#pragma unroll
    for (int i = 0; i < Config::MaxTokens / 4; ++i) {  // token 8 j + 2 t + e
      int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
      const float* d = sums + i / 2 * 4 + i % 2;
      if (token < tile.rows) {
        float scale = token_scale[token];
        *reinterpret_cast<float2*>(out + static_cast<int64_t>(token) * problem_.n) =
            make_float2(d[0] * scale + bias.x, d[2] * scale + bias.y);
      }
    }
  }

  SharedStorage<Config>& shared_;
  const Problem& problem_;
  const Maps& maps_;
  int store_buffer_ = 0;
};

}  // namespace fp4::sm90
