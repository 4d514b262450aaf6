// Copies rows of bytes, each with a factor, to the places of their experts.
#include <cstdint>

#include "launch.cuh"
#include "ptx.cuh"

namespace fp4::device {
namespace {

constexpr int kPlaceThreads = 256;

// One warp copies one row.
__global__ void __launch_bounds__(kPlaceThreads)
    place_kernel(const uint8_t* x, const float* factor, int count, const int* position, int copies,
                 const int* end, int bytes, uint8_t* out, float* out_factor) {
  wait_previous_kernel();
  release_next_kernel();
  const int lane = threadIdx.x % 32, row = blockIdx.x * (kPlaceThreads / 32) + threadIdx.x / 32;
  if (row >= count) return;
  const int to = lane < copies ? position[int64_t(row) * copies + lane] : -1;
  const bool live = to >= 0 && to < *end;
  uint32_t wanted = __ballot_sync(~0u, live);
  if (live) out_factor[to] = factor[row];
  const auto* from = reinterpret_cast<const uint4*>(x + int64_t(row) * bytes);
  for (int first = lane; wanted != 0 && first - lane < bytes / 16; first += 4 * 32) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (first + 32 * i < bytes / 16) v[i] = from[first + 32 * i];
    for (uint32_t left = wanted; left != 0; left &= left - 1) {
      const int at = __shfl_sync(~0u, to, 31 - __clz(left & -left));
      auto* o = reinterpret_cast<uint4*>(out + int64_t(at) * bytes);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (first + 32 * i < bytes / 16) o[first + 32 * i] = v[i];
    }
  }
}

}  // namespace
}  // namespace fp4::device

// Copies row r of x [count, bytes] (bytes: a multiple of 16) and factor[r] to the rows position[r, ..] of out
// and out_factor. At most 32 copies; rows from *end on are not written. dependent: the kernel may start while
// the kernel before it, which makes position, still runs.
extern "C" int fp4_kernel_place(const void* x, const float* factor, int count, const int* position,
                                int copies, const int* end, int bytes, void* out, float* out_factor,
                                int dependent, void* stream) {
  using namespace fp4::device;
  if (count == 0) return 0;
  if (bytes % 16 != 0 || copies > 32) return cudaErrorInvalidValue;
  const int rows = kPlaceThreads / 32;
  return launch_kernel(place_kernel, {dim3((count + rows - 1) / rows), dim3(kPlaceThreads)}, dependent,
                       static_cast<cudaStream_t>(stream), static_cast<const uint8_t*>(x), factor, count,
                       position, copies, end, bytes, static_cast<uint8_t*>(out), out_factor);
}
