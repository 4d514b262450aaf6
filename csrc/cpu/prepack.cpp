#include "cpu/prepack.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <cmath>
#include <cstring>

#include "common/boxed.h"
#include "common/convert.h"
#include "cpu/parallel.h"
#include "cpu/rowwise.h"
#include "cpu/sm90_layout.h"

namespace fp4::cpu {
namespace {

using Packed = std::tuple<Tensor, Tensor, Tensor>;

// Asks for huge pages for a large new tensor. Weights are streamed, and page walks would slow that down.
void advise_huge_pages(const Tensor& t) {
#if defined(__linux__)
  constexpr uintptr_t page = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(t.data_ptr()) + page - 1) / page * page;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(t.data_ptr()) + t.numel() * t.element_size()) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // may be refused
#endif
}

// Copies t, because no output may share memory with an input.
Tensor copy_of(const OptionalTensor& t) {
  if (!t) return empty({0}, ScalarType::Float);
  const Tensor from = as_contiguous(*t), to = empty(shape_of(*t), ScalarType::Float);
  copy_bytes(to.data_ptr(), from.data_ptr(), from.numel() * sizeof(float));
  return to;
}

struct Sizes {
  int64_t matrices, n, k;
  explicit Sizes(const Tensor& packed)
      : matrices(packed.dim() == 3 ? packed.size(0) : 1),
        n(packed.size(packed.dim() - 2)),
        k(packed.size(packed.dim() - 1) * 2) {}
};

// --- tile16 ---

BlockScales block_scales(const Tensor& block_scale, Stored weight) {
  return {weight.format->block, scale_kind(block_scale.scalar_type())};
}

// Converts between plain and tile16, which have the same bytes in another order. f(codes, scales, to_codes,
// to_scales, k) moves one panel of 16 rows. Rows that tile16 keeps plain are copied.
template <typename F>
std::tuple<Tensor, Tensor> reorder(const Tensor& packed, const Tensor& block_scale, Stored target,
                                   const F& f) {
  const Tensor to = empty(shape_of(packed), ScalarType::Byte);
  advise_huge_pages(to);
  const Tensor to_scale = empty(shape_of(block_scale), block_scale.scalar_type());
  advise_huge_pages(to_scale);
  const Tensor from = as_contiguous(packed), from_scale = as_contiguous(block_scale);
  const auto [matrices, n, k] = Sizes(packed);
  const int64_t row_bytes = k / 2, row_scales = block_scales(block_scale, target).bytes(k);
  const int64_t panels = ceil_div(n, kPanelRows);
  const uint8_t *codes = data<uint8_t>(from), *scales = data<uint8_t>(from_scale);
  uint8_t *to_codes = mutable_data<uint8_t>(to), *to_scales = mutable_data<uint8_t>(to_scale);
  const bool tiled = target.layout->order == Order::tile16;
  parallel_for(0, matrices * panels, grain_for(k * kPanelRows), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i % panels * kPanelRows, first = i / panels * n + row;
      const int64_t at = first * row_bytes, scale_at = first * row_scales;
      if (tiled && is_panel(row, n, k)) {
        f(codes + at, scales + scale_at, to_codes + at, to_scales + scale_at, k);
      } else {
        const int64_t count = std::min<int64_t>(kPanelRows, n - row);
        std::memcpy(to_codes + at, codes + at, count * row_bytes);
        std::memcpy(to_scales + scale_at, scales + scale_at, count * row_scales);
      }
    }
  });
  return {to, to_scale};
}

// --- sm90 and mma_bf16 ---

constexpr int kE4m3Exponents = 17;  // e4m3's powers of two: 2^8 and 17 binades below it, down to 2^-9
constexpr int kEmaxBias = 135;      // a matrix has the factor 2^(Emax - 135), which turns Emax into 2^8

// 2^x as e4m3, -9 <= x <= 8.
uint8_t power_to_e4m3(int x) { return uint8_t(x >= -6 ? (x + 7) << 3 : 1 << (x + 9)); }

bool all_zero(const uint8_t* codes, int64_t bytes) {
  uint8_t any = 0;
  for (int64_t i = 0; i < bytes; ++i) any |= codes[i];
  return (any & 0x77) == 0;
}

// Reads one plain row as the blocks of 16 that sm90 holds. K is a multiple of 16.
struct PlainRow {
  const Format& format;
  const uint8_t *codes, *scales;
  int64_t k;
  int emax;  // the matrix's largest exponent, for e8m0

  // mxfp4: true if block b of 32 has a value that is not zero. Otherwise its exponent does not matter.
  bool counts(int64_t b) const {
    const int64_t begin = b * format.block / 2;
    return !all_zero(codes + begin, std::min<int64_t>(format.block / 2, k / 2 - begin));
  }

  Block16 block(int64_t i) const {
    Block16 out{};
    const int64_t b = i * kSm90Block / format.block;
    if (b * format.block >= k) return out;  // padding
    if (format.scale == Scale::e4m3) {
      out.scale = scales[b];
    } else {
      if (!counts(b)) return out;
      out.scale = power_to_e4m3(scales[b] - emax + 8);
    }
    if (i * kSm90Block < k) std::memcpy(out.codes, codes + i * kSm90Block / 2, sizeof(out.codes));
    return out;
  }
};

// mxfp4: the largest exponent of each matrix among the blocks that are not all zeros.
std::vector<int> largest_exponents(const Format& fmt, const Layout& layout, const uint8_t* codes,
                                   const uint8_t* scales, const Sizes& s) {
  const int64_t blocks = ceil_div(s.k, fmt.block);
  std::vector<int> low(s.matrices * s.n, 255), high(s.matrices * s.n, -1), emax(s.matrices);
  parallel_for(0, s.matrices * s.n, grain_for(s.k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const PlainRow row{fmt, codes + r * (s.k / 2), scales + r * blocks, s.k, 0};
      for (int64_t b = 0; b < blocks; ++b)
        if (row.counts(b)) {
          low[r] = std::min<int>(low[r], row.scales[b]);
          high[r] = std::max<int>(high[r], row.scales[b]);
        }
    }
  });
  for (int64_t g = 0; g < s.matrices; ++g) {
    int least = 255;
    emax[g] = -1;
    for (int64_t r = g * s.n; r < (g + 1) * s.n; ++r) {
      least = std::min(least, low[r]);
      emax[g] = std::max(emax[g], high[r]);
    }
    if (emax[g] < 0) emax[g] = kEmaxBias;  // all zeros: a factor of 1
    if (emax[g] - least > kE4m3Exponents)
      fail("block_scale of matrix ", g, " spreads over ", emax[g] - least, " binades; layout '", layout.name,
           "' holds at most ", kE4m3Exponents);
  }
  return emax;
}

void check_not_negative(const Tensor& block_scale, const Layout& layout) {
  const uint8_t* bytes = data<uint8_t>(block_scale);
  for (int64_t i = 0, count = block_scale.numel(); i < count; ++i)
    if (bytes[i] & 0x80) fail("block_scale has negative values; layout '", layout.name, "' cannot hold them");
}

template <class Bits>
Packed to_sm90(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
               Stored target) {
  const Format& fmt = *target.format;
  const Layout& layout = *target.layout;
  const Sizes s(packed);
  const int64_t kp = layout.padded(s.k), blocks = ceil_div(s.k, fmt.block), tiles = s.n / kSm90Rows;
  Shape shape = shape_of(packed), scale_shape = shape;
  shape.back() = kp / 2;
  scale_shape.back() = kp / fmt.block;
  const Tensor to = empty(shape, ScalarType::Byte), to_scale = empty(scale_shape, ScalarType::Byte);
  const Tensor from = as_contiguous(packed), from_scale = as_contiguous(block_scale);
  const uint8_t *codes = data<uint8_t>(from), *scales = data<uint8_t>(from_scale);
  std::vector<int> emax(s.matrices, 0);
  Tensor factor = copy_of(global_scale);
  if (fmt.scale == Scale::e4m3) {
    check_not_negative(from_scale, layout);
  } else {
    emax = largest_exponents(fmt, layout, codes, scales, s);
    factor = empty(Shape(shape.begin(), shape.end() - 2), ScalarType::Float);
    for (int64_t g = 0; g < s.matrices; ++g)
      mutable_data<float>(factor)[g] = std::ldexp(1.f, emax[g] - kEmaxBias);
  }
  uint8_t *to_codes = mutable_data<uint8_t>(to), *to_scales = mutable_data<uint8_t>(to_scale);
  parallel_for(0, s.matrices * tiles, grain_for(s.k * kSm90Rows), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kSm90Rows; row < end * kSm90Rows; ++row) {
      const int64_t g = row / s.n;
      const PlainRow plain{fmt, codes + row * (s.k / 2), scales + row * blocks, s.k, emax[g]};
      for (int64_t b = 0; b < kp / kSm90Block; ++b) {
        sm90_store<Bits>(plain.block(b), sm90_place<Bits>(row % s.n, b, kp, fmt.block),
                         to_codes + g * s.n * (kp / 2), to_scales + g * s.n * (kp / fmt.block));
      }
    }
  });
  return {to, to_scale, factor};
}

// The exponent byte of an mxfp4 block with this e4m3 scale, or -1 if no byte fits.
int to_e8m0(uint8_t scale, int emax) {
  if (scale == 0) return 0;
  int exponent;
  if (std::frexp(e4m3_to_float(scale), &exponent) != .5f) return -1;
  const int byte = exponent - 1 + emax - 8;
  return byte >= 0 && byte < 255 ? byte : -1;
}

template <class Bits>
Packed from_sm90(const Tensor& packed, const Tensor& block_scale, const Tensor& global_scale, Stored source) {
  const Format& fmt = *source.format;
  const Sizes s(packed);
  const int64_t blocks = s.k / fmt.block, tiles = s.n / kSm90Rows;
  const bool mx = fmt.scale == Scale::e8m0;
  Shape scale_shape = shape_of(packed);
  scale_shape.back() = blocks;
  const Tensor to = empty(shape_of(packed), ScalarType::Byte),
               to_scale = empty(scale_shape, fmt.scale_dtypes[0]);
  const Tensor from = as_contiguous(packed), from_scale = as_contiguous(block_scale);
  const Tensor factor = as_contiguous(global_scale);
  std::atomic<bool> exact = true;
  parallel_for(0, s.matrices * tiles, grain_for(s.k * kSm90Rows), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kSm90Rows; row < end * kSm90Rows; ++row) {
      const int64_t g = row / s.n, per_block = fmt.block / kSm90Block;
      uint8_t* codes = mutable_data<uint8_t>(to) + row * (s.k / 2);
      uint8_t* scales = mutable_data<uint8_t>(to_scale) + row * blocks;
      int exponent = 0;
      if (mx && std::frexp(data<float>(factor)[g], &exponent) != .5f) exact = false;
      for (int64_t b = 0; b < blocks; ++b) {
        uint8_t scale = 0;
        for (int64_t i = b * per_block; i < (b + 1) * per_block; ++i) {
          const Block16 block = sm90_load<Bits>(sm90_place<Bits>(row % s.n, i, s.k, fmt.block),
                                                data<uint8_t>(from) + g * s.n * (s.k / 2),
                                                data<uint8_t>(from_scale) + g * s.n * blocks);
          std::memcpy(codes + i * kSm90Block / 2, block.codes, kSm90Block / 2);
          scale = block.scale;
        }
        const int byte = mx ? to_e8m0(scale, exponent - 1 + kEmaxBias) : scale;
        if (byte < 0) exact = false;
        scales[b] = uint8_t(byte);
      }
    }
  });
  if (!exact) fail("packed is no mxfp4 weight: its scales are not all powers of two");
  return {to, to_scale, copy_of(mx ? OptionalTensor() : OptionalTensor(factor))};
}

// --- sm90_int4 ---

// Converts a byte of two int4 codes to the nibbles of the layout, and back.
struct Int4Bytes {
  uint8_t of[256];

  explicit Int4Bytes(bool back) {
    for (int low = 0; low < 16; ++low) {
      for (int high = 0; high < 16; ++high) {
        const int plain = low | high << 4, packed = kSm90Int4Nibbles[low] | kSm90Int4Nibbles[high] << 4;
        of[back ? packed : plain] = uint8_t(back ? plain : packed);
      }
    }
  }
};

// The power of two that brings 8 times the largest scale into the range 224 to 448, e4m3's largest value. It
// is at least the smallest normal float.
float int4_factor(float largest) {
  if (largest == 0) return 1;
  int exponent;
  const float mantissa = std::frexp(largest, &exponent);
  return std::ldexp(1.f, std::max(exponent - (mantissa <= .875f ? 6 : 5), -126));
}

Packed to_sm90_int4(const Tensor& packed, const Tensor& block_scale, Stored target) {
  const Format& fmt = *target.format;
  const Layout& layout = *target.layout;
  const Sizes s(packed);
  const int64_t kp = layout.padded(s.k), blocks = kp / fmt.block, own = ceil_div(s.k, fmt.block);
  Shape shape = shape_of(packed), scale_shape = shape;
  shape.back() = kp / 2;
  scale_shape.back() = blocks;
  const Tensor to = empty(shape, ScalarType::Byte), to_scale = empty(scale_shape, ScalarType::Float),
               to_factor = empty(Shape(shape.begin(), shape.end() - 2), ScalarType::Float);
  const Tensor from = as_contiguous(packed), from_scale = as_contiguous(block_scale);
  const bool wide = scale_kind(from_scale.scalar_type()) == Scale::f32;
  const uint8_t* scales = data<uint8_t>(from_scale);
  const auto scale_at = [&](int64_t i) {
    return wide ? load_as_float<DType::f32>(scales, i) : load_as_float<DType::bf16>(scales, i);
  };
  float* factor = mutable_data<float>(to_factor);
  for (int64_t g = 0; g < s.matrices; ++g) {
    float least = 0, largest = 0;
    for (int64_t i = g * s.n * own; i < (g + 1) * s.n * own; ++i) {
      least = std::min(least, scale_at(i));
      largest = std::max(largest, scale_at(i));
    }
    if (least < 0) fail("block_scale has negative values; layout '", layout.name, "' cannot hold them");
    if (std::isinf(largest))
      fail("block_scale has infinite values; layout '", layout.name, "' cannot hold them");
    factor[g] = int4_factor(largest);
  }
  static const Int4Bytes bytes(/*back=*/false);
  std::atomic<int64_t> lost = -1;  // a matrix with a scale that the factor moves out of range
  parallel_for(0, s.matrices * s.n, grain_for(s.k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t g = i / s.n, matrix = g * s.n, row = i % s.n;
      const uint8_t* codes = data<uint8_t>(from) + i * (s.k / 2);
      for (int64_t b = 0; b < kp / kSm90Block; ++b) {
        uint8_t* place = mutable_data<uint8_t>(to) + matrix * (kp / 2) + sm90_int4_codes(row, b, kp);
        for (int64_t j = 0; j < kSm90Block / 2; ++j)  // zeros where K is padded
          place[j] = bytes.of[b * kSm90Block < s.k ? codes[b * kSm90Block / 2 + j] : 0];
      }
      float* row_scales = mutable_data<float>(to_scale) + matrix * blocks;
      for (int64_t b = 0; b < blocks; ++b) {
        const float scale = b < own ? scale_at(i * own + b) : 0.f, held = scale / factor[g];
        if (held * factor[g] != scale) lost = g;
        row_scales[sm90_int4_scale(row, b, blocks)] = held + 0.f;  // not -0
      }
    }
  });
  if (lost >= 0)
    fail("block_scale of matrix ", lost.load(), " has values too far below its largest; layout '",
         layout.name, "' cannot hold them");
  return {to, to_scale, to_factor};
}

// Block scales stay float32, because the original ones may have been float32.
Packed from_sm90_int4(const Tensor& packed, const Tensor& block_scale, const Tensor& factor, Stored source) {
  const Sizes s(packed);
  const int64_t blocks = s.k / source.format->block;
  const Tensor to = empty(shape_of(packed), ScalarType::Byte),
               to_scale = empty(shape_of(block_scale), ScalarType::Float);
  const Tensor from = as_contiguous(packed), from_scale = as_contiguous(block_scale);
  const Tensor factors = as_contiguous(factor);
  static const Int4Bytes bytes(/*back=*/true);
  parallel_for(0, s.matrices * s.n, grain_for(s.k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t g = i / s.n, matrix = g * s.n, row = i % s.n;
      for (int64_t b = 0; b < s.k / kSm90Block; ++b) {
        const uint8_t* place = data<uint8_t>(from) + matrix * (s.k / 2) + sm90_int4_codes(row, b, s.k);
        uint8_t* codes = mutable_data<uint8_t>(to) + i * (s.k / 2) + b * kSm90Block / 2;
        for (int64_t j = 0; j < kSm90Block / 2; ++j) codes[j] = bytes.of[place[j]];
      }
      for (int64_t b = 0; b < blocks; ++b)
        mutable_data<float>(to_scale)[i * blocks + b] =
            data<float>(from_scale)[matrix * blocks + sm90_int4_scale(row, b, blocks)] *
            data<float>(factors)[g];
    }
  });
  return {to, to_scale, copy_of({})};
}

// --- operators ---

void check_scales_finite(const Tensor& block_scale) {
  const Tensor c = as_contiguous(block_scale);
  const uint8_t* bytes = data<uint8_t>(c);
  const Scale scale = scale_kind(c.scalar_type());
  parallel_for(0, c.numel(), fitted::grains::checked_scales, [&](int64_t begin, int64_t end) {
    check_scales(scale, bytes + begin * scale_size(scale), end - begin);
  });
}

Packed prepack(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
               const std::string& format, const std::string& layout) {
  const Stored target = check_prepack(packed, block_scale, global_scale, format, layout);
  check_scales_finite(block_scale);
  const Order order = target.layout->order;
  if (order == Order::sm90) return to_sm90<Sm90>(packed, block_scale, global_scale, target);
  if (order == Order::mma_bf16) return to_sm90<MmaBf16>(packed, block_scale, global_scale, target);
  if (order == Order::sm90_int4) return to_sm90_int4(packed, block_scale, target);
  const auto [codes, scales] = reorder(
      packed, block_scale, target,
      [&](const uint8_t* from, const uint8_t* from_scales, uint8_t* to, uint8_t* to_scales, int64_t k) {
        pack_panel(from, from_scales, kPanelRows, k, block_scales(block_scale, target), to, to_scales);
      });
  return {codes, scales, copy_of(global_scale)};
}

Packed unpack(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
              const std::string& format, const std::string& layout) {
  return to_plain(packed, block_scale, global_scale,
                  check_unpack(packed, block_scale, global_scale, format, layout));
}

template <typename IsNan>
bool any_of(int64_t count, IsNan is_nan) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= is_nan(i);
  return found;
}

bool any_nan(Scale scale, const uint8_t* scales, int64_t count) {
  switch (scale) {
    case Scale::e4m3:
      return any_of(count, [&](int64_t i) { return (scales[i] & 0x7f) == 0x7f; });
    case Scale::e8m0:
      return any_of(count, [&](int64_t i) { return scales[i] == 0xff; });
    case Scale::bf16:
      return any_of(count, [&](int64_t i) { return std::isnan(load_as_float<DType::bf16>(scales, i)); });
    case Scale::f32:
      break;
  }
  return any_of(count, [&](int64_t i) { return std::isnan(load_as_float<DType::f32>(scales, i)); });
}

}  // namespace

void check_scales(Scale scale, const uint8_t* scales, int64_t count) {
  if (any_nan(scale, scales, count)) fail("block_scale has NaN values; the weight is damaged");
}

Packed to_plain(const Tensor& packed, const Tensor& block_scale, const OptionalTensor& global_scale,
                Stored from) {
  const Order order = from.layout->order;
  if (order == Order::sm90) return from_sm90<Sm90>(packed, block_scale, *global_scale, from);
  if (order == Order::mma_bf16) return from_sm90<MmaBf16>(packed, block_scale, *global_scale, from);
  if (order == Order::sm90_int4) return from_sm90_int4(packed, block_scale, *global_scale, from);
  const auto [codes, scales] = reorder(
      packed, block_scale, from,
      [&](const uint8_t* panel, const uint8_t* panel_scales, uint8_t* to, uint8_t* to_scales, int64_t k) {
        unpack_panel(panel, panel_scales, k, block_scales(block_scale, from), to, to_scales);
      });
  return {codes, scales, copy_of(global_scale)};
}

STABLE_TORCH_LIBRARY_IMPL(fp4, CPU, m) {
  m.impl("prepack", FP4_BOX(prepack));
  m.impl("unpack", FP4_BOX(unpack));
}

}  // namespace fp4::cpu
