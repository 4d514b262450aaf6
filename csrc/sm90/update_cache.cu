// Rotary position embedding of queries and keys, with the RMS norm of each head before it, and the write of
// keys and values to a cache. A warp takes a head. The interface is plain C, without torch.
#include "../device/launch.cuh"
#include "../device/ptx.cuh"
#include "../device/update_cache.h"
#include "heads.cuh"

namespace fp4::sm90 {
namespace {

using namespace device;

constexpr int kWarps = 4;  // of a block, each with its own head

template <class Half, int kEach>
__global__ void __launch_bounds__(32 * kWarps)
    update_cache_kernel(const __grid_constant__ UpdateCacheParams p) {
  using Its = Head<Half, kEach>;
  using Stored = StoredHead<Half, kEach>;
  release_next_kernel();
  wait_previous_kernel();
  const int heads = p.q_heads + 2 * p.kv_heads;
  const int64_t all = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (all >= int64_t(p.sequences) * p.tokens * heads) return;
  const int row = int(all / heads), number = int(all % heads);  // row: of sequences and tokens
  const int sequence = row / p.tokens, token = row % p.tokens;
  const bool is_q = number < p.q_heads, is_v = number >= p.q_heads + p.kv_heads;
  const int head = number - (is_q ? 0 : is_v ? p.q_heads + p.kv_heads : p.q_heads);
  const int64_t place = is_q ? 0 : *p.start + token;
  if (!is_q && (place < 0 || place >= p.length)) return;
  const int64_t to =
      is_q ? int64_t(row) * p.q_heads + head : (int64_t(sequence) * p.kv_heads + head) * p.length + place;
  const int64_t from = int64_t(row) * (is_q ? p.q_heads : p.kv_heads) + head;
  if (is_v) {
    Stored::load(p.v, from).store(p.values, to);
    return;
  }
  Its x(Stored::load(is_q ? p.q : p.k, from));
  const int angle = p.one_angle ? token : row;
  const Stored cos = Stored::load(p.cos, angle), sin = Stored::load(p.sin, angle);
  if (const void* norm = is_q ? p.q_norm : p.k_norm) {
    const Stored weight = Stored::load(norm, 0);
    float sum = x.squares();
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    x = x.normed(weight, sum, p.eps);
  }
  x.rotated(cos, sin).stored().store(is_q ? p.out : p.keys, to);
}

template <class Half>
int launch_size(const UpdateCacheParams& p, cudaStream_t stream) {
  const int64_t heads = int64_t(p.sequences) * p.tokens * (p.q_heads + 2 * p.kv_heads);
  const LaunchShape shape = {dim3(unsigned((heads + kWarps - 1) / kWarps)), dim3(32 * kWarps), 0, 1, true};
  const auto start = [&](auto* kernel) { return launch_kernel(kernel, shape, true, stream, p); };
  if (p.size == 64) return start(update_cache_kernel<Half, 1>);
  if (p.size == 128) return start(update_cache_kernel<Half, 2>);
  return p.size == 256 ? start(update_cache_kernel<Half, 4>) : int(cudaErrorInvalidValue);
}

}  // namespace
}  // namespace fp4::sm90

extern "C" int fp4_kernel_update_cache(const fp4::device::UpdateCacheParams* params, void* stream) {
  using namespace fp4::sm90;
  auto* s = static_cast<cudaStream_t>(stream);
  return params->type == DType::kBFloat16 ? launch_size<__nv_bfloat16>(*params, s)
                                          : launch_size<__half>(*params, s);
}
