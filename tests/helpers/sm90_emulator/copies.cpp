// The copy engine: boxes of tensors into and out of shared memory; and the few functions of CUDA's interface
// that launchers call, of which one makes tensor maps.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>

#include "block.h"

namespace emulator {
namespace {

// The contents of a CUtensorMap here.
struct Map {
  uint32_t element, swizzle;  // bytes; swizzle: 0, 64 or 128
  uint32_t gap;               // bytes that follow each element in shared memory, and that no barrier counts
  uint32_t box[3];
  uint64_t base, size[3], stride[3];  // size in elements; stride in bytes, the first one an element's
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
constexpr int kCodes = 16;  // of an element of 16U4_ALIGN16B

// Calls f(shared address, global address or null outside of the tensor) for all elements of a box.
template <class F>
void for_each_element(const Map& map, uint32_t shared, const int (&at)[3], const F& f) {
  uint32_t offset = 0;
  for (uint32_t k = 0; k < map.box[2]; ++k) {
    for (uint32_t j = 0; j < map.box[1]; ++j) {
      for (uint32_t i = 0; i < map.box[0]; ++i, offset += map.element + map.gap) {
        const int64_t c[3] = {at[0] + int64_t(i), at[1] + int64_t(j), at[2] + int64_t(k)};
        bool inside = true;
        uint64_t global = map.base;
        for (int d = 0; d < 3; ++d) {
          inside = inside && c[d] >= 0 && uint64_t(c[d]) < map.size[d];
          global += c[d] * map.stride[d];
        }
        f(swizzled(shared + offset, map.swizzle), inside ? reinterpret_cast<uint8_t*>(global) : nullptr);
      }
    }
  }
}

const Map& contents(const CUtensorMap* map) { return *reinterpret_cast<const Map*>(map); }

}  // namespace

void Block::load(size_t which) {
  const Load load = loads_[which];
  loads_.erase(loads_.begin() + which);
  if (load.map == nullptr) {
    if (!holds(load.to, load.bytes)) return fail("a bulk copy goes beyond shared memory");
    std::memcpy(memory_ + load.to, load.from, load.bytes);
    complete_bytes(load.barrier, load.bytes);
    return progressed();
  }
  const Map& map = contents(load.map);
  const uint32_t elements = map.box[0] * map.box[1] * map.box[2], bytes = elements * map.element;
  // A map of 16 codes in 16 bytes counts codes, and its boxes begin at multiples of 128.
  if (map.gap > 0 && load.x % 128 != 0) return fail("a box of codes begins between its multiples");
  // Seen on an H200: with any other coordinate the copy is an illegal instruction.
  if (map.gap == 0 && load.x * int64_t(map.element) % 16 != 0)
    return fail("a box does not begin at a multiple of 16 bytes");
  const int x = map.gap > 0 ? load.x / kCodes : load.x;
  for (uint32_t rank = 0; rank < cluster_.blocks.size(); ++rank) {
    if ((load.blocks >> rank & 1) == 0) continue;
    Block& to = *cluster_.blocks[rank];
    if (to.ended_ || !to.holds(load.to, bytes + elements * map.gap)) {
      return fail("a load goes to a block that has ended, or beyond shared memory");
    }
    for_each_element(map, load.to, {x, load.y, 0}, [&](uint32_t shared, const uint8_t* global) {
      std::memset(to.memory() + shared + map.element, 0xFF, map.gap);  // nothing may read it
      if (global != nullptr) {
        std::memcpy(to.memory() + shared, global, map.element);
      } else {
        std::memset(to.memory() + shared, 0, map.element);
      }
    });
    const bool even = load.barrier & kOfEvenBlock;
    Block& told = even ? paired(0) : to;
    if ((even && load.ctas == 1) || told.ended_) return fail("a load tells the barrier of another block");
    told.complete_bytes(load.barrier & ~kOfEvenBlock, bytes);
  }
  progressed();
}

void Block::store(const Store& store) {
  const Map& map = contents(store.map);
  for_each_element(map, store.from, {store.x, store.y, store.z}, [&](uint32_t shared, uint8_t* global) {
    if (global != nullptr) std::memcpy(global, memory_ + shared, map.element);
  });
}

void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, uint32_t blocks) {
  block->loads_.push_back({map, to, barrier, x, y, blocks});
}

void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if ((reinterpret_cast<uintptr_t>(from) | to | bytes) % 16 != 0 || bytes == 0)
    return block->fail("a bulk copy is no multiple of 16 bytes");
  block->loads_.push_back({nullptr, to, barrier, 0, 0, 0, 1, from, bytes});
}

void load_box_of_group(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y, int ctas) {
  block->loads_.push_back({map, to, barrier, x, y, 1u << cluster_rank(), ctas});
}

uint32_t leading_barrier(uint32_t barrier) { return barrier | kOfEvenBlock; }

void store_box(const CUtensorMap* map, uint32_t from, int x, int y, int z) {
  block->lane_->stores.push_back({map, from, x, y, z});
}

void store_commit() {
  Lane& lane = *block->lane_;
  if (!block->late_) {
    for (const Store& store : lane.stores) block->store(store);
    lane.stores.clear();
  }
  lane.store_groups.push_back(std::move(lane.stores));
  lane.stores.clear();
}

void Block::copy(const Copy& copy) {
  if (!holds(copy.to, copy.size) || copy.to % copy.size != 0)
    return fail("a copy goes beyond shared memory, or between pieces");
  std::memset(memory_ + copy.to, 0, copy.size);
  if (copy.bytes > 0) std::memcpy(memory_ + copy.to, copy.from, copy.bytes);
}

// At once, or when it is waited for.
void copy(uint32_t to, const void* from, int bytes, uint32_t size) {
  if (block->late_) {
    block->lane_->copies.push_back({to, from, bytes, size});
  } else {
    block->copy({to, from, bytes, size});
  }
}

void copy_commit() {
  Lane& lane = *block->lane_;
  lane.copy_groups.push_back(std::move(lane.copies));
  lane.copies.clear();
}

void copy_wait(int pending) {
  Lane& lane = *block->lane_;
  while (static_cast<int>(lane.copy_groups.size()) > pending) {
    for (const Copy& copy : lane.copy_groups.front()) block->copy(copy);
    lane.copy_groups.pop_front();
  }
}

void store_wait(int pending) {
  Lane& lane = *block->lane_;
  while (static_cast<int>(lane.store_groups.size()) > pending) {
    for (const Store& store : lane.store_groups.front()) block->store(store);
    lane.store_groups.pop_front();
  }
}

}  // namespace emulator

// ---- the parts of CUDA's interface that launchers call ----

namespace {

int capability = 90, multiprocessors = 1, shared_bytes = 227 * 1024;

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  emulator::Map contents = {};
  const bool unpacks = type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B;
  contents.gap = unpacks ? 8 : 0;
  contents.element = unpacks                                 ? 8
                     : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1
                     : type == CU_TENSOR_MAP_DATA_TYPE_INT64 ? 8
                                                             : 2;
  contents.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                     : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                            : 0;
  contents.base = reinterpret_cast<uint64_t>(base);
  for (uint32_t d = 0; d < 3; ++d) {
    contents.size[d] = d < rank ? sizes[d] : 1;
    contents.box[d] = d < rank ? box[d] : 1;
    contents.stride[d] = d == 0 ? contents.element : d < rank ? strides[d - 1] : 0;
    // What the hardware asks for.
    if (contents.box[d] > 256 || (d > 0 && contents.stride[d] % (unpacks ? 32 : 16) != 0))
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (unpacks) {  // as cuda.h asks
    if (contents.base % 32 != 0 || sizes[0] % 128 != 0 || box[0] != 128 ||
        swizzle == CU_TENSOR_MAP_SWIZZLE_64B)
      return CUDA_ERROR_INVALID_VALUE;
    contents.size[0] /= emulator::kCodes, contents.box[0] /= emulator::kCodes;
  }
  const uint32_t row = contents.box[0] * (contents.element + contents.gap);
  if (contents.base % 16 != 0 || row % 16 != 0 || (contents.swizzle > 0 && row > contents.swizzle)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(map, &contents, sizeof(contents));
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

// Before anything is launched.
void emulator_device(int its_capability, int count, int bytes) {
  capability = its_capability, multiprocessors = count, shared_bytes = bytes;
}
void emulator_seed(uint32_t seed) { emulator::set_seed(seed); }
void emulator_patience(int seconds) { emulator::set_patience(seconds); }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = shared_bytes;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = shared_bytes + 1024;
      break;
    default:  // clocks and the bus, which are not told
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&encode_tiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
