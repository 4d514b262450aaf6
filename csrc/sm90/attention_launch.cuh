// Chooses the form of attention's kernel for some sizes, and launches it. For attention.cu and
// cached_attention.cu.
#pragma once

#include "attention.cuh"

namespace fp4::sm90::attention {

// Clusters of more than eight blocks need this GPU's consent: a part of a GPU may have too few
// multiprocessors side by side. A bit for each device: whether it was asked, and its answer.
struct LargeClusters {
  std::atomic<uint64_t> asked{0}, allowed{0};

  template <class Kernel>
  bool run(Kernel* kernel, const LaunchShape& shape) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return false;
    const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
    if (asked.load(std::memory_order_acquire) & bit) return allowed.load(std::memory_order_relaxed) & bit;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = shape.cluster, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(shape.cluster), config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared;
    config.attrs = &cluster, config.numAttrs = 1;
    int at_once = 0;
    const bool fits =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&at_once, kernel, &config) == cudaSuccess && at_once > 0;
    if (!fits) cudaGetLastError();  // clears the error
    if (fits) allowed.fetch_or(bit, std::memory_order_relaxed);
    asked.fetch_or(bit, std::memory_order_release);
    return fits;
  }
};

// `kBlocks` blocks of `kWarps` warps run on a multiprocessor at once.
template <class Half, int kSize, int kTiles, int kWarps, int kBlocks, class Update>
int launch_form(AttentionParams p, const void* sinks, const Update& update, int64_t clusters, int sms,
                cudaStream_t stream) {
  constexpr auto kernel = attention_kernel<Half, kSize, kTiles, kWarps, kBlocks, Update>;
  constexpr int kShared = sizeof(typename Token<Update, Half, kSize, kTiles, kWarps>::Shared), kPortable = 8;
  static std::atomic<uint64_t> shared{0};
  static LargeClusters large;
  if (const cudaError_t error = allow_shared(kernel, kShared, shared); error != cudaSuccess) return error;
  // As many blocks as the GPU runs at once, if each still has tiles.
  const int tiles = (p.length + Lanes<kSize>::kKeys - 1) / Lanes<kSize>::kKeys;
  int splits = 1;
  while (2 * splits <= most_splits(kSize) && 2 * splits * clusters <= kBlocks * sms && 2 * splits <= tiles)
    splits *= 2;
  LaunchShape shape = {dim3(), dim3(kWarps * 32), kShared, unsigned(splits), true};
  if (splits > kPortable && !large.run(kernel, shape)) shape.cluster = splits = kPortable;
  if (clusters * splits > INT32_MAX) return cudaErrorInvalidValue;
  shape.grid = dim3(unsigned(clusters * splits));
  p.split_bits = 0;
  while (1 << p.split_bits < splits) ++p.split_bits;
  return launch_kernel(kernel, shape, true, stream, p, sinks, update);
}

// The form for few heads divides their keys among blocks, that for many has more warps for the keys of each.
// Both were the fastest of 18 on an H200, for 100 to 16384 keys that are seen: for 1 and 8 sequences with 4
// or 8 heads of keys, and for 64. There, eight query heads shared keys. More need more registers than these
// forms have; theirs was not measured.
template <class Half, int kSize, class Update>
int launch_size(AttentionParams p, const void* sinks, const Update& update, int sms, cudaStream_t stream) {
  const int group = p.q_heads / p.kv_heads, together = group > 8 ? 16 : 8;
  p.parts = (group + together - 1) / together;
  const int64_t clusters = int64_t(p.sequences) * p.kv_heads * p.parts;
  if (group > 8) return launch_form<Half, kSize, 2, 4, 2>(p, sinks, update, clusters, sms, stream);
  return clusters <= sms ? launch_form<Half, kSize, 1, 4, 3>(p, sinks, update, clusters, sms, stream)
                         : launch_form<Half, kSize, 1, 6, 2>(p, sinks, update, clusters, sms, stream);
}

template <class Half, class Update>
int launch(const AttentionParams& p, const void* sinks, const Update& update, int sms, cudaStream_t stream) {
  switch (p.size) {
    case 64:
      return launch_size<Half, 64>(p, sinks, update, sms, stream);
    case 128:
      return launch_size<Half, 128>(p, sinks, update, sms, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace fp4::sm90::attention
