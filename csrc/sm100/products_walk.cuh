// Walks over tiles, as each role of a thread block does: at a fixed distance, or as cluster launch control
// hands them out.
//
// With cluster launch control a launch has a cluster for each tile, and its id is the number of the tile. The
// clusters that run take the tiles of those that have not started: one warp of block 0 asks the hardware to
// cancel the start of a cluster, and every warp of the cluster reads the response. A request may fail while
// clusters are left. These start later, and nobody may ask again after it. Ids may come in any order.
#pragma once

#include "../sm90/ptx_sm90.cuh"
#include "products_along_k.cuh"

namespace fp4::sm100 {

// The ids of clusters whose tiles this cluster computes: its own, and those of the clusters that it
// cancelled.
template <class Config>
class ClusterIds {
 public:
  // asks: the calling warp is the one that asks the hardware.
  __device__ __forceinline__ ClusterIds(SharedStorage<Config>& shared, bool asks)
      : shared_(shared), asks_(asks) {}

  // Called by a whole warp; false after the last id.
  __device__ __forceinline__ bool next(int& id) {
    if (begun_) {
      uint32_t first_block;
      barrier_wait(smem_address(&shared_.responses_full[read_.index]), read_.parity);
      const bool cancelled = query_cancel(smem_address(&shared_.responses[read_.index]), first_block);
      sm90::fence_async_proxy();  // the next response is written by another engine
      sm90::barrier_arrive_remote(smem_address(&shared_.responses_empty[read_.index]), 0);
      read_.next();
      if (!cancelled) return false;
      id = static_cast<int>(first_block) / Config::Ctas;
    } else {
      begun_ = true;
      id = blockIdx.x / Config::Ctas;
    }
    if (asks_) ask();
    return true;
  }

 private:
  // Asks for the id after the one that is taken now, so that the response comes while its tile is computed.
  __device__ __forceinline__ void ask() {
    const uint32_t full = smem_address(&shared_.responses_full[asked_.index]);
    barrier_wait(smem_address(&shared_.responses_empty[asked_.index]), asked_.parity ^ 1);
    const int lane = threadIdx.x % kWarp;
    if (lane < Config::Ctas) barrier_expect_bytes_remote(full, lane, sizeof(uint4));
    if (sm90::elect_lane()) try_cancel(smem_address(&shared_.responses[asked_.index]), full);
    asked_.next();
  }

  SharedStorage<Config>& shared_;
  const bool asks_;
  bool begun_ = false;
  Ring<kResponses> read_, asked_;
};

template <class Config>
class ProductWalk {
 public:
  // asks: as in ClusterIds.
  __device__ __forceinline__ ProductWalk(const Problem& problem, SharedStorage<Config>& shared, bool asks)
      : problem_(problem), walk_(problem.tiling), ids_(shared, asks) {}

  // Called by a whole warp; false after the last tile. An id behind the last tile is a tile without rows and
  // steps, because the host knows only how many tiles there are at most.
  __device__ __forceinline__ bool next(ProductTile& tile) {
    if constexpr (Config::Clc) {
      const int before = id_;
      if (!ids_.next(id_)) return false;
      if (id_ < before) walk_.restart();
      walk_.go_to(id_);
      if (!walk_.next(tile)) {
        tile = {};
        return true;
      }
    } else {
      if (!walk_.next(tile)) return false;
    }
    place<Config>(problem_, tile);
    return true;
  }

  // Returns the id that the last tile belongs to.
  __device__ __forceinline__ int id() const { return id_; }

 private:
  const Problem& problem_;
  TileWalk<typename Config::Widths, Config::Ctas> walk_;
  ClusterIds<Config> ids_;
  int id_ = 0;
};

}  // namespace fp4::sm100
