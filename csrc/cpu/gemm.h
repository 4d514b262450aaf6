// The parallel loop that all matrix products share. It runs over (expert, panel of 16 weight rows) and
// multiplies the panel by the expert's activation rows. If an expert has many rows, it uses tiles and takes
// two panels at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cpu/activations.h"

namespace fp4::cpu {

// A stack of packed matrices b [groups, n, k].
struct Weight {
  const Format* format;
  Order order;
  bool batch_invariant;  // a row's bits must not depend on the rows beside it
  Scale scale;
  int64_t groups, n, k;
  const uint8_t* codes;
  const uint8_t* scales;
  const float* global_scale;  // [groups], or null
  const void* bias;           // [groups, n], or null
  DType bias_dtype;

  BlockScales block_scales() const { return {format->block, scale}; }
};

// `count` rows of one expert, at positions begin, begin + 1, ... Position p has activation row a_index[p] and
// output row out_index[p]. If an index is empty, position p has row p.
struct Segment {
  int64_t expert, begin, count;
};

struct Rows {
  std::vector<Segment> segments;
  std::vector<int64_t> a_index, out_index;
};

// Sorts rows by expert (stable). ids [count] are the experts; rows with an id outside [0, groups) are left
// out. Row i is activation row i / rows_per_a. `position`, if not null, gets each row's place after sorting,
// or -1.
Rows sort_by_expert(const int64_t* ids, int64_t count, int64_t groups, int64_t rows_per_a,
                    std::vector<int64_t>* position);

// out[row] [n] = a[row] . weight[expert]^T * global_scale[expert] + bias[expert], for the rows of each
// segment. Other rows of out are not written. `a`, `rows` and `out` must live until the phases have run.
class Product {
 public:
  Product(const Activations& a, const Weight& weight, const Rows& rows, void* out, DType out_dtype);
  ~Product();

  // The phases that run after a's own `fill`: first pack, then multiply. Both use this object.
  Phase pack();
  Phase multiply();

 private:
  // The units of work of one segment. There are `count`, and each costs as much as `cost` products of a panel
  // with kTokenBlock rows. With tiles, a unit is two panels and at most kTileBlocks blocks of 16 rows.
  // Otherwise it is one panel and at most rows_at_once_ rows. Units are ordered by panel, so a run of them
  // reads each panel once and in the order of memory.
  struct Units {
    int64_t blocks, first_block;  // of 16 rows for tiles; 0 if the segment has few rows
    int64_t row_groups, count, cost, first_cost;
  };
  struct Scratch;

  const uint8_t* a_row(int64_t position) const {
    return a_.row(rows_.a_index.empty() ? position : rows_.a_index[position]);
  }
  void pack_blocks(int64_t begin, int64_t end);
  std::pair<int64_t, int64_t> units_in(const Units& units, int64_t begin, int64_t end) const;
  void run(int64_t begin, int64_t end);
  void run_segments(int64_t begin, int64_t end, Scratch& scratch) const;
  void run_panels(size_t s, int64_t begin, int64_t end, Scratch& scratch) const;
  void run_tiles(size_t s, int64_t begin, int64_t end, Scratch& scratch) const;
  void store(const Segment& segment, int64_t position, int count, int64_t panel, int panels,
             const float* tile) const;

  const Activations& a_;
  const Weight w_;
  const Rows& rows_;
  uint8_t* const out_;
  const DType out_dtype_;
  const int64_t kp_, panels_;
  const int rows_at_once_;  // of a panel kernel
  std::vector<Units> units_;
  int64_t cost_ = 0;
  std::vector<Segment> blocks_;  // blocks of rows for tiles, at most 16 positions each
  int64_t block_bytes_ = 0;
  Buffer packed_;  // the packed blocks
  // Scratch memory for tiles that finished parts have returned. Later parts reuse it, because a fresh page
  // costs more than filling it.
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

// Runs one product, including a's `fill`.
void gemm(const Activations& a, const Weight& weight, const Rows& rows, void* out, DType out_dtype);

}  // namespace fp4::cpu
