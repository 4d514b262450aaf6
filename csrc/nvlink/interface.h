// Exchange between the GPUs of one node: kernels that write into the other ranks' memory. Plain C, without
// torch: fp4_ops/distributed/nvlink.py mirrors these structures.
//
// Each rank has a buffer that all ranks can address (symmetric memory), of one layout:
//   headers  [2][kMaxRanks] uint64    who has begun which call
//   flags    [2][kMaxRanks][kSlots] uint32    which pieces of plain data are there
//   words    [2][ranks][word_stride]  pieces of 16 bytes that carry data and flag; never anything else
//   parts    [2][ranks][part_stride]  plain data of reduce and all_reduce
//   rows, factors, ids, weights       what gather brings: [ranks * tokens, ..] of the call at hand
// Every kernel is one call of all ranks, with the next number of one counter, its epoch. What is there twice
// is used by the parity of the epoch. No kernel ends before all ranks have begun the same call, and so have
// read what the call before brought: nothing that somebody still reads is overwritten. `rows` and what
// follows is read between a gather and the call after it, which no rank's next gather can overtake.
#pragma once

#include <cstdint>

namespace fp4::nvlink {

constexpr int kMaxRanks = 16, kSlots = 2048, kMaxTopK = 32;

enum Kind : int32_t { kGather = 0, kReduce = 1, kAllReduce = 2 };
enum Type : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Reason : uint32_t { kNone = 0, kLate = 1, kDiffers = 2 };

// In the host's memory; written once, before the kernel is aborted.
struct Failure {
  uint32_t reason, kind, rank, epoch, theirs, ours;  // rank: which one did not come, or called otherwise
};

struct Workspace {
  uint8_t* base[kMaxRanks];  // of each rank's buffer, as this process addresses it
  int64_t headers, flags, words, parts, rows, factors, ids, weights;  // places in it
  int64_t word_stride, part_stride;
  int32_t* counters;  // of this rank alone: the last epoch, blocks that are done, whether a wait has failed
  Failure* failure;
  int64_t patience;  // nanoseconds that a rank is waited for
  int32_t rank, ranks;
};

// rows[r * tokens + t] of each rank = x[t] of rank r; ids[..] the local number of the expert or -1. Of rows
// that have no expert there, `rows` keeps what it was.
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

// out[t] = the sum over the ranks, in their order, of each one's part of my token t, rounded to out's type
// before.
struct ReduceParams {
  Workspace space;
  const void* y;            // parts [ranks * tokens, columns] of out's type; or rows of experts, of y_type
  const int32_t* position;  // fused: place in y of (row, slot); null: row * top_k + slot
  const int32_t* ids;       // [ranks * tokens, top_k] as gather brought them
  const float* weights;     // fused: [ranks * tokens, top_k]
  const void* own_ids;      // [own, top_k] as gather was given them
  const void* own_weights;  // fused: the same
  void* out;                // [own, columns]
  int32_t own, tokens, columns, top_k, experts;
  int32_t ids64, weight_type, type, y_type, fused, words;
  int32_t blocks, turns;  // turns: what a block sends at a time is a turn-th of its rows, at least
  int32_t early;  // of what is read, the kernel launched before makes y at most, and began after gather's end
  uint32_t signature;
};

// out = the sum over the ranks, in their order, of x; `units` pieces of 16 bytes. x and out are aligned so.
struct AllReduceParams {
  Workspace space;
  const void* x;
  void* out;
  int64_t units;
  int32_t type, words;
  int32_t blocks, turns;
  int32_t two_steps;  // each rank adds a share of it: fewer bytes on the way for more than two ranks
  uint32_t signature;
};

}  // namespace fp4::nvlink

extern "C" {
// All return a cudaError_t.
int fp4_nvlink_gather(const fp4::nvlink::GatherParams* params, void* stream);
int fp4_nvlink_reduce(const fp4::nvlink::ReduceParams* params, void* stream);
int fp4_nvlink_all_reduce(const fp4::nvlink::AllReduceParams* params, void* stream);
// Bytes of each struct above, by which Python notices that it was built for others.
int fp4_nvlink_sizes(int which);
}
