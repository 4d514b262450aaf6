// The exchange between the GPUs of one node, by kernels that write into the memory of the other ranks. The
// interface is plain C without torch. fp4_ops/distributed/nvlink.py mirrors these structures.
//
// Each rank has a buffer that all ranks can address (symmetric memory). All buffers have the same layout:
//   headers  [2][kMaxRanks] uint64           which rank has begun which call
//   flags    [2][kMaxRanks][kSlots] uint32   which slots of plain data have arrived
//   words    [2][ranks][word_stride]         pieces of 16 bytes that carry data and flags, and nothing else
//   parts    [2][ranks][part_stride]         plain data of reduce and all_reduce
//   rows, factors, ids, weights              what gather receives: [ranks * tokens, ..] of the current call
// Every kernel is one call of all ranks. The calls are numbered by one counter; a call's number is its epoch.
// Areas with [2] are used in turn, by the parity of the epoch. No kernel ends before all ranks have begun the
// same call. By then they have read everything of the call before, so nothing is overwritten while somebody
// still reads it. `rows` and the areas after it are read between a gather and the next call. No rank's next
// gather can come before that.
#pragma once

#include <cstdint>

namespace fp4::nvlink {

constexpr int kMaxRanks = 16, kSlots = 2048, kMaxTopK = 32;

enum Kind : int32_t { kGather = 0, kReduce = 1, kAllReduce = 2 };
enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Reason : uint32_t { kNone = 0, kLate = 1, kDiffers = 2 };

// An error report in host memory. It is written once, before the kernel is aborted.
struct Failure {
  // rank: the rank that did not come, or that made another call
  uint32_t reason, kind, rank, epoch, theirs, ours;
};

struct Workspace {
  uint8_t* base[kMaxRanks];  // each rank's buffer, as this process addresses it
  int64_t headers, flags, words, parts, rows, factors, ids, weights;  // offsets in a buffer
  int64_t word_stride, part_stride;
  // Only of this rank: the last epoch, the number of finished blocks, whether a wait has failed.
  int32_t* counters;
  Failure* failure;
  int64_t patience;  // nanoseconds to wait for a rank
  int32_t rank, ranks;
};

// Gather writes rows[r * tokens + t] = x[t] of rank r on each rank, and ids[..] = the local number of the
// expert or -1. A row that has no expert on a rank keeps its old content there.
struct GatherParams {
  Workspace space;
  const uint8_t* x;     // [own, row_bytes]; row_bytes is a multiple of 16
  const float* factor;  // [own], or null
  const void* ids;      // [own, top_k] of all experts, int32 or int64
  const void* weights;  // [own, top_k]
  int32_t own, tokens;  // own <= tokens, which is the same on all ranks
  int32_t row_bytes, top_k, experts;
  int32_t ids64, weight_type;
  int32_t words;   // few bytes: data that carries its flags
  int32_t blocks;  // at most; here and below the same on all ranks
  uint32_t signature;
};

// out[t] = the sum over the ranks, in their order, of each rank's part of this rank's token t. Each part is
// rounded to out's type before it is added.
struct ReduceParams {
  Workspace space;
  const void* y;  // parts [ranks * tokens, columns] of out's type, or fused: rows of experts, of y_type
  const int32_t* position;  // fused: place in y of (row, slot); null: row * top_k + slot
  const int32_t* ids;       // [ranks * tokens, top_k] as gather received them
  const float* weights;     // fused: [ranks * tokens, top_k]
  const void* own_ids;      // [own, top_k] as gather got them from the caller
  const void* own_weights;  // fused: the same
  void* out;                // [own, columns]
  int32_t own, tokens, columns, top_k, experts;
  int32_t ids64, weight_type, type, y_type, fused, words;
  int32_t blocks, turns;  // a block sends its rows in at most `turns` pieces
  int32_t early;  // the kernel launched before this one makes at most y, and began after the gather had ended
  uint32_t signature;
};

// out = the sum of x over the ranks, in their order; `units` pieces of 16 bytes. x and out are aligned to 16
// bytes.
struct AllReduceParams {
  Workspace space;
  const void* x;
  void* out;
  int64_t units;
  int32_t type, words;
  int32_t blocks, turns;
  int32_t two_steps;  // each rank adds up one share: with more than two ranks this sends fewer bytes
  uint32_t signature;
};

}  // namespace fp4::nvlink

extern "C" {
// The first three return a cudaError_t.
int fp4_nvlink_gather(const fp4::nvlink::GatherParams* params, void* stream);
int fp4_nvlink_reduce(const fp4::nvlink::ReduceParams* params, void* stream);
int fp4_nvlink_all_reduce(const fp4::nvlink::AllReduceParams* params, void* stream);
// The size of each struct above in bytes. Python uses them to notice a library of another version.
int fp4_nvlink_sizes(int which);
}
