#include "cpu/gemm.h"

#include <algorithm>

#include "cpu/prepack.h"
#include "cpu_constants.h"

namespace fp4::cpu {

namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool one_order(RowKind kind) {
  const Kernels& kn = kernels();
  return kind == RowKind::int8 || (kind == RowKind::bf16 ? kn.bf16->one_order : kn.one_order);
}

// Returns the least number of rows of an expert for which tiles are used. 0: tiles are never used.
int64_t min_tile_rows(RowKind kind, const Weight& weight) {
  const TileKernels* tiles = kernels().tiles;
  if (tiles == nullptr || (weight.batch_invariant && !tiles->same_bits(kind, weight.scale))) return 0;
  return tiles->min_rows.of(kind);
}

}  // namespace

// Reads panels of one expert's matrix: in place if the layout stores panels, else packed into `scratch_`.
class PanelReader {
 public:
  explicit PanelReader(const Weight& weight)
      : w_(weight), scales_(weight.block_scales()), kp_(padded_k(weight.k)) {}

  Panel read(int64_t expert, int64_t row) {
    const int64_t first = expert * w_.n + row;
    const uint8_t* codes = w_.codes + first * (w_.k / 2);
    const uint8_t* scales = w_.scales + first * scales_.bytes(w_.k);
    if (w_.order == Order::tile16 && is_panel(row, w_.n, w_.k)) return {codes, scales, kp_, scales_.block};
    if (!scratch_.data()) scratch_ = Buffer((kp_ / 2 + scales_.bytes(kp_)) * kPanelRows);
    uint8_t* panel_scales = scratch_.data() + kp_ / 2 * kPanelRows;
    const int64_t count = std::min<int64_t>(kPanelRows, w_.n - row);
    check_scales(scales_.scale, scales, count * scales_.count(w_.k));
    pack_panel(codes, scales, count, w_.k, scales_, scratch_.data(), panel_scales);
    return {scratch_.data(), panel_scales, kp_, scales_.block};
  }

 private:
  const Weight& w_;
  BlockScales scales_;
  int64_t kp_;
  Buffer scratch_;
};

Rows sort_by_expert(const int64_t* ids, int64_t count, int64_t groups, int64_t rows_per_a,
                    std::vector<int64_t>* position) {
  std::vector<int64_t> next(groups + 1);  // the position of each expert's next row
  const auto valid = [&](int64_t id) { return id >= 0 && id < groups; };
  for (int64_t i = 0; i < count; ++i)
    if (valid(ids[i])) ++next[ids[i] + 1];
  Rows rows;
  for (int64_t e = 0; e < groups; ++e) {
    if (next[e + 1] > 0) rows.segments.push_back({e, next[e], next[e + 1]});
    next[e + 1] += next[e];
  }
  rows.a_index.resize(next[groups]);
  rows.out_index.resize(next[groups]);
  if (position != nullptr) position->assign(count, -1);
  for (int64_t i = 0; i < count; ++i) {
    if (!valid(ids[i])) continue;
    const int64_t p = next[ids[i]]++;
    rows.a_index[p] = i / rows_per_a;
    rows.out_index[p] = i;
    if (position != nullptr) (*position)[i] = p;
  }
  return rows;
}

struct Product::Scratch {
  explicit Scratch(const Weight& weight) : readers{PanelReader(weight), PanelReader(weight)} {}

  PanelReader readers[2];
  Buffer unpacked;  // two panels for tiles
  Buffer sums;      // the results of one unit
};

Product::Product(const Activations& a, const Weight& weight, const Rows& rows, void* out, DType out_dtype)
    : a_(a),
      w_(weight),
      rows_(rows),
      out_(static_cast<uint8_t*>(out)),
      out_dtype_(out_dtype),
      kp_(padded_k(weight.k)),
      panels_(ceil_div(weight.n, kPanelRows)),
      rows_at_once_(weight.batch_invariant && !one_order(a.kind) ? 1 : kTokenBlock) {
  const TileKernels* tiles = kernels().tiles;
  const int64_t min_rows = min_tile_rows(a.kind, weight);
  for (const Segment& s : rows.segments) {
    Units u{.blocks = 0, .first_block = int64_t(blocks_.size()), .first_cost = cost_};
    if (min_rows > 0 && s.count >= min_rows) {
      for (int64_t i = 0; i < s.count; i += kTileRows)
        blocks_.push_back({s.expert, s.begin + i, std::min<int64_t>(kTileRows, s.count - i)});
      u.blocks = int64_t(blocks_.size()) - u.first_block;
      u.row_groups = ceil_div(u.blocks, kTileBlocks);
      u.count = ceil_div(panels_, 2) * u.row_groups;
      u.cost = std::min<int64_t>(u.blocks, kTileBlocks) * kTileRows / kTokenBlock * 2 / tiles->speed;
    } else {
      u.row_groups = ceil_div(s.count, rows_at_once_);
      u.count = panels_ * u.row_groups;
      u.cost = 1;
    }
    cost_ += u.count * u.cost;
    units_.push_back(u);
  }
}

Phase Product::pack() {
  if (blocks_.empty()) return {};
  block_bytes_ = kernels().tiles->rows_bytes(a_.kind, kp_);
  packed_ = Buffer(int64_t(blocks_.size()) * block_bytes_);
  return {int64_t(blocks_.size()), rows_per_thread(block_bytes_),
          [this](int64_t begin, int64_t end) { pack_blocks(begin, end); }};
}

Phase Product::multiply() {
  // A thread should get at least `multiply_adds` of work, or it is not worth waking.
  const int64_t cost_work = (w_.k + 1) * kPanelRows;
  return {cost_, std::max<int64_t>(1, fitted::grains::multiply_adds / cost_work),
          [this](int64_t begin, int64_t end) { run(begin, end); }};
}

void Product::pack_blocks(int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const uint8_t* from[kTileRows];
    for (int64_t i = 0; i < blocks_[b].count; ++i) from[i] = a_row(blocks_[b].begin + i);
    kernels().tiles->pack_rows(a_.kind, from, int(blocks_[b].count), kp_, packed_.data() + b * block_bytes_);
  }
}

// The range of units that begin in the part [begin, end) of the total cost.
std::pair<int64_t, int64_t> Product::units_in(const Units& u, int64_t begin, int64_t end) const {
  const auto from = [&](int64_t cost) {
    return cost <= u.first_cost ? 0 : std::min(u.count, ceil_div(cost - u.first_cost, u.cost));
  };
  return {from(begin), from(end)};
}

Product::~Product() = default;

void Product::run(int64_t begin, int64_t end) {
  if (blocks_.empty()) {
    Scratch scratch(w_);
    return run_segments(begin, end, scratch);
  }
  std::unique_ptr<Scratch> scratch;
  {
    const std::lock_guard lock(mutex_);
    if (!scratch_.empty()) {
      scratch = std::move(scratch_.back());
      scratch_.pop_back();
    }
  }
  if (scratch == nullptr) scratch = std::make_unique<Scratch>(w_);
  run_segments(begin, end, *scratch);
  const std::lock_guard lock(mutex_);
  scratch_.push_back(std::move(scratch));
}

void Product::run_segments(int64_t begin, int64_t end, Scratch& scratch) const {
  for (size_t s = 0; s < units_.size(); ++s) {
    const Units& u = units_[s];
    const auto [first, last] = units_in(u, begin, end);
    if (first >= last) continue;
    if (u.blocks > 0)
      run_tiles(s, first, last, scratch);
    else
      run_panels(s, first, last, scratch);
  }
}

void Product::run_panels(size_t s, int64_t begin, int64_t end, Scratch& scratch) const {
  const Kernels& kn = kernels();
  const PanelKernels& panel_kernels = kn.panels[int(w_.scale)];
  const PanelKernel multiply = a_.kind == RowKind::int8   ? panel_kernels.int8
                               : a_.kind == RowKind::bf16 ? kn.bf16->panels[int(w_.scale)]
                                                          : panel_kernels.floating;
  const Segment& segment = rows_.segments[s];
  const int64_t groups = units_[s].row_groups;
  Panel panel{};
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t p = unit / groups, first = unit % groups * rows_at_once_;
    if (unit == begin || first == 0) panel = scratch.readers[0].read(segment.expert, p * kPanelRows);
    const int count = int(std::min<int64_t>(rows_at_once_, segment.count - first));
    const uint8_t* a_rows[kTokenBlock];
    for (int i = 0; i < count; ++i) a_rows[i] = a_row(segment.begin + first + i);
    alignas(64) float tile[kTokenBlock * kPanelRows];
    multiply(panel, a_rows, count, tile);
    store(segment, segment.begin + first, count, p, 1, tile);
  }
}

void Product::run_tiles(size_t s, int64_t begin, int64_t end, Scratch& scratch) const {
  const TileKernels& tiles = *kernels().tiles;
  const Segment& segment = rows_.segments[s];
  const Units& u = units_[s];
  const int64_t panel_bytes = tiles.panel_bytes(kp_);
  constexpr int64_t kSums = kTileRows * kPanelRows;
  if (scratch.unpacked.data() == nullptr) {
    scratch.unpacked = Buffer(2 * panel_bytes);
    scratch.sums = Buffer(kTileBlocks * 2 * kSums * int64_t(sizeof(float)));
  }
  uint8_t* const weights[2] = {scratch.unpacked.data(), scratch.unpacked.data() + panel_bytes};
  Panel panels[2];
  bool scaled[2] = {};
  for (int64_t unit = begin; unit < end; ++unit) {
    const int64_t p = unit / u.row_groups * 2, first = unit % u.row_groups * kTileBlocks;
    const int count = int(std::min<int64_t>(2, panels_ - p));
    if (unit == begin || first == 0)
      for (int i = 0; i < count; ++i) {
        panels[i] = scratch.readers[i].read(segment.expert, (p + i) * kPanelRows);
        scaled[i] = tiles.unpack[int(w_.scale)](panels[i], weights[i]);
      }
    const int blocks = int(std::min<int64_t>(kTileBlocks, u.blocks - first));
    const int row_count = int(std::min<int64_t>(blocks * kTileRows, segment.count - first * kTileRows));
    tiles.multiply(a_.kind, packed_.data() + (u.first_block + first) * block_bytes_, row_count, panels, count,
                   weights, scaled, scratch.sums.floats());
    for (int b = 0; b < blocks; ++b) {
      const Segment& block = blocks_[u.first_block + first + b];
      store(segment, block.begin, int(block.count), p, 2, scratch.sums.floats() + b * 2 * kSums);
    }
  }
}

// Stores tile [count][panels][16] to the output rows of the positions from `position` on.
void Product::store(const Segment& segment, int64_t position, int count, int64_t panel, int panels,
                    const float* tile) const {
  const Kernels& kn = kernels();
  const int64_t n0 = panel * kPanelRows, width = panels * kPanelRows;
  const int64_t columns = std::min(width, w_.n - n0);
  const float factor = w_.global_scale ? w_.global_scale[segment.expert] : 1.f;
  const void* bias = w_.bias == nullptr ? nullptr
                                        : static_cast<const uint8_t*>(w_.bias) +
                                              (segment.expert * w_.n + n0) * dtype_size(w_.bias_dtype);
  for (int i = 0; i < count; ++i) {
    const int64_t row = rows_.out_index.empty() ? position + i : rows_.out_index[position + i];
    kn.store(tile + i * width, factor, bias, w_.bias_dtype, out_ + (row * w_.n + n0) * dtype_size(out_dtype_),
             out_dtype_, columns);
  }
}

void gemm(const Activations& a, const Weight& weight, const Rows& rows, void* out, DType out_dtype) {
  Product product(a, weight, rows, out, out_dtype);
  run_phases({a.fill, product.pack(), product.multiply()});
}

}  // namespace fp4::cpu
