// Converts between layouts of activation rows on the CPU: offs, m_indices and masked groups.
#include <cstring>
#include <tuple>

#include "common/boxed.h"
#include "cpu/tensors.h"

namespace fp4::cpu {
namespace {

// Returns offs as a list and checks that it rises and stays within m rows.
std::vector<int64_t> checked_offs(const Tensor& offs, int64_t m, const char* limit) {
  std::vector<int64_t> ends = indices(offs);
  int64_t begin = 0;
  for (size_t g = 0; g < ends.size(); begin = ends[g++]) {
    if (ends[g] < begin) fail("offs decreases from ", begin, " to ", ends[g], " at index ", g);
    if (ends[g] > m) fail("offs is ", ends[g], " at index ", g, "; ", limit, " ", m);
  }
  return ends;
}

std::vector<int64_t> checked_counts(const Tensor& masked_m, int64_t max_m) {
  std::vector<int64_t> counts = indices(masked_m);
  for (size_t g = 0; g < counts.size(); ++g)
    if (counts[g] < 0 || counts[g] > max_m)
      fail("masked_m is ", counts[g], " at index ", g, "; it must be between 0 and ", max_m);
  return counts;
}

Tensor offs_to_m_indices(const Tensor& offs, int64_t m) {
  check_offs_to_m_indices(offs, m);
  const std::vector<int64_t> ends = checked_offs(offs, m, "m is only");
  const Tensor out = empty({m}, ScalarType::Int);
  int32_t* to = mutable_data<int32_t>(out);
  int64_t row = 0;
  for (size_t g = 0; g < ends.size(); ++g)
    for (; row < ends[g]; ++row) to[row] = int32_t(g);
  for (; row < m; ++row) to[row] = -1;
  return out;
}

Tensor m_indices_to_offs(const Tensor& m_indices, int64_t num_groups) {
  check_m_indices_to_offs(m_indices, num_groups);
  const std::vector<int64_t> ids = indices(m_indices);
  std::vector<int64_t> counts(num_groups, 0);
  int64_t previous = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i] == -1 ? num_groups : ids[i];  // padding sorts last
    if (id < 0 || ids[i] >= num_groups)
      fail("m_indices is ", ids[i], " at index ", i, "; it must be -1 (padding) or between 0 and ",
           num_groups - 1);
    if (id < previous)
      fail("m_indices is ", ids[i], " at index ", i, " after ", previous == num_groups ? -1 : previous,
           "; it must rise, with padding (-1) only at the end");
    previous = id;
    if (id < num_groups) ++counts[id];
  }
  const Tensor out = empty({num_groups}, ScalarType::Int);
  int64_t end = 0;
  for (int64_t g = 0; g < num_groups; ++g) mutable_data<int32_t>(out)[g] = int32_t(end += counts[g]);
  return out;
}

std::tuple<Tensor, Tensor> to_masked(const Tensor& a, const Tensor& offs, int64_t max_m) {
  check_to_masked(a, offs, max_m);
  const std::vector<int64_t> ends = checked_offs(offs, a.size(0), "the rows of a are only");
  const int64_t groups = ends.size(), k = a.size(1), row_bytes = k * a.element_size();
  const Tensor source = as_contiguous(a);
  const Tensor out = empty({groups, max_m, k}, a.scalar_type()), masked_m = empty({groups}, ScalarType::Int);
  uint8_t* to = mutable_data<uint8_t>(out);
  int64_t begin = 0;
  for (int64_t g = 0; g < groups; begin = ends[g++]) {
    const int64_t count = ends[g] - begin;
    if (count > max_m) fail("offs gives group ", g, " ", count, " rows; max_m is only ", max_m);
    mutable_data<int32_t>(masked_m)[g] = int32_t(count);
    copy_bytes(to + g * max_m * row_bytes, data<uint8_t>(source) + begin * row_bytes, count * row_bytes);
    zero_bytes(to + (g * max_m + count) * row_bytes, (max_m - count) * row_bytes);
  }
  return {out, masked_m};
}

std::tuple<Tensor, Tensor> from_masked(const Tensor& a, const Tensor& masked_m, int64_t m) {
  check_from_masked(a, masked_m, m);
  const int64_t groups = a.size(0), max_m = a.size(1), k = a.size(2), row_bytes = k * a.element_size();
  const std::vector<int64_t> counts = checked_counts(masked_m, max_m);
  const Tensor source = as_contiguous(a);
  const Tensor out = empty({m, k}, a.scalar_type()), offs = empty({groups}, ScalarType::Int);
  uint8_t* to = mutable_data<uint8_t>(out);
  int64_t row = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (row + counts[g] > m)
      fail("masked_m adds up to ", row + counts[g], " at index ", g, "; m is only ", m);
    copy_bytes(to + row * row_bytes, data<uint8_t>(source) + g * max_m * row_bytes, counts[g] * row_bytes);
    row += counts[g];
    mutable_data<int32_t>(offs)[g] = int32_t(row);
  }
  zero_bytes(to + row * row_bytes, (m - row) * row_bytes);
  return {out, offs};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("offs_to_m_indices", FP4_BOX(offs_to_m_indices));
  m.impl("m_indices_to_offs", FP4_BOX(m_indices_to_offs));
  m.impl("to_masked", FP4_BOX(to_masked));
  m.impl("from_masked", FP4_BOX(from_masked));
}

}  // namespace fp4::cpu
