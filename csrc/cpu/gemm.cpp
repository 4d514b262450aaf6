#include "cpu/gemm.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace fp4::cpu {

namespace {

// A thread should get this many multiply-adds before it is worth waking.
constexpr int64_t kWorkPerThread = 1 << 18;

// The panels of one expert's matrix: in place where the layout stores panels, else packed into `scratch`.
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
    pack_panel(codes, scales, count, w_.k, scales_, scratch_.data(), panel_scales);
    return {scratch_.data(), panel_scales, kp_, scales_.block};
  }

 private:
  const Weight& w_;
  BlockScales scales_;
  int64_t kp_;
  Buffer scratch_;
};

}  // namespace

Rows sort_by_expert(const int64_t* ids, int64_t count, int64_t groups, int64_t rows_per_a,
                    std::vector<int64_t>* position) {
  std::vector<int64_t> next(groups + 1);  // where each expert's next row goes
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

void gemm(const Activations& a, const Weight& weight, const Rows& rows, void* out, DType out_dtype) {
  if (weight.n == 0) return;
  const Kernels& kn = kernels();
  const PanelKernels& panel_kernels = kn.panels[int(weight.scale)];
  const PanelKernel multiply = a.kind == RowKind::int8   ? panel_kernels.int8
                               : a.kind == RowKind::bf16 ? kn.bf16->panels[int(weight.scale)]
                                                         : panel_kernels.floating;
  const int64_t panels = (weight.n + kPanelRows - 1) / kPanelRows;
  // One unit of work: a panel and at most kTokenBlock rows. Units are ordered by segment, then panel, so a
  // thread's run of units meets each panel once and in the order of memory.
  std::vector<int64_t> first_unit = {0};
  for (const Segment& s : rows.segments)
    first_unit.push_back(first_unit.back() + panels * ((s.count + kTokenBlock - 1) / kTokenBlock));

  const int64_t out_size = dtype_size(out_dtype), bias_size = dtype_size(weight.bias_dtype);
  const auto run = [&](int64_t begin, int64_t end) {
    PanelReader reader(weight);
    Panel panel{};
    int64_t loaded_segment = -1, loaded_panel = -1;
    size_t s = std::upper_bound(first_unit.begin(), first_unit.end(), begin) - first_unit.begin() - 1;
    for (int64_t unit = begin; unit < end; ++unit) {
      while (unit >= first_unit[s + 1]) ++s;
      const Segment& segment = rows.segments[s];
      const int64_t blocks = (segment.count + kTokenBlock - 1) / kTokenBlock;
      const int64_t p = (unit - first_unit[s]) / blocks, block = (unit - first_unit[s]) % blocks;
      const int64_t n0 = p * kPanelRows, columns = std::min<int64_t>(kPanelRows, weight.n - n0);
      if (loaded_segment != int64_t(s) || loaded_panel != p) panel = reader.read(segment.expert, n0);
      loaded_segment = s, loaded_panel = p;

      const int64_t at = segment.begin + block * kTokenBlock;
      const int count = int(std::min<int64_t>(kTokenBlock, segment.count - block * kTokenBlock));
      const uint8_t* a_rows[kTokenBlock];
      for (int i = 0; i < count; ++i)
        a_rows[i] = a.data + (rows.a_index.empty() ? at + i : rows.a_index[at + i]) * a.stride;
      alignas(64) float tile[kTokenBlock * kPanelRows];
      multiply(panel, a_rows, count, tile);

      const float factor = weight.global_scale ? weight.global_scale[segment.expert] : 1.f;
      const void* bias = weight.bias == nullptr ? nullptr
                                                : static_cast<const uint8_t*>(weight.bias) +
                                                      (segment.expert * weight.n + n0) * bias_size;
      for (int i = 0; i < count; ++i) {
        const int64_t row = rows.out_index.empty() ? at + i : rows.out_index[at + i];
        kn.store(tile + i * kPanelRows, factor, bias, weight.bias_dtype,
                 static_cast<uint8_t*>(out) + (row * weight.n + n0) * out_size, out_dtype, columns);
      }
    }
  };
  const int64_t unit_work = (weight.k + 1) * kPanelRows;
  torch::stable::parallel_for(0, first_unit.back(), std::max<int64_t>(1, kWorkPerThread / unit_work), run);
}

}  // namespace fp4::cpu
