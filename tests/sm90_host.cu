// What the Hopper kernels compute in registers, run on the host for test_sm90_host.py: no GPU is needed.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "decode.cuh"
#include "fp4_block.cuh"
#include "prefill_arguments.cuh"
#include "prefill_fold.cuh"
#include "prefill_half.cuh"
#include "prefill_int4.cuh"
#include "row_values.cuh"

using namespace fp4::sm90;

// bytes [256][8]: the e4m3 fold of the magnitudes 0 to 6 for each scale byte (with the layout's flag).
extern "C" void fold_tables(const uint8_t* scales, int count, int fast, uint8_t* bytes) {
  for (int i = 0; i < count; ++i) {
    const uint32_t plain = scales[i] & 0x7F, once = plain - kEighth;
    const FoldTable table = fast ? fast_table(once, once + 5 - (scales[i] >> 7), 0) : any_table(scales[i]);
    memcpy(bytes + 8 * i, &table.low, 4);
    memcpy(bytes + 8 * i + 4, &table.high, 4);
  }
}

// Words of eight codes with the scale byte of each: the A operand's bytes for 4t..4t+3 and 16+4t..16+4t+3.
extern "C" void fold_words(const uint32_t* words, const uint8_t* scales, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i) fold_word(words[i], any_table(scales[i]), out[2 * i], out[2 * i + 1]);
}

// The same for decode: four fp16 pairs a word.
extern "C" void decode_words(const uint32_t* words, const uint8_t* scales, int count, uint16_t* out) {
  for (int i = 0; i < count; ++i) {
    uint32_t pairs[4];
    dequantize_word(words[i], __low2half2(HalfWords::decode_scales(scales[i] & 0x7F)), pairs);
    memcpy(out + 8 * i, pairs, sizeof(pairs));
  }
}

// Blocks of layout sm90_bf16, two words and a scale byte each: eight bf16 pairs.
extern "C" void bf16_blocks(const uint32_t* words, const uint8_t* scales, int count, uint16_t* out) {
  for (int i = 0; i < count; ++i) {
    uint32_t pairs[2][4];
    Bf16Words().dequantize(words[2 * i], words[2 * i + 1],
                           Bf16Words::low(Bf16Words::decode_scales(scales[i])), pairs);
    memcpy(out + 16 * i, pairs, sizeof(pairs));
  }
}

// Where each of k elements of an fp16 activation row lies.
extern "C" void half_positions(int k, int* out) {
  for (int i = 0; i < k; ++i) out[i] = half_position(i);
}

// x [rows, k] float32 -> values [rows, k] and factor [rows], as fp4_row_kernel does it.
extern "C" void quantize_rows(const float* x, int rows, int k, int nvfp4, float* values, float* factor) {
  const int block = nvfp4 ? 16 : 32;
  const auto largest = [](const float* v, int count) {
    float m = 0.f;
    for (int i = 0; i < count; ++i) m = fmaxf(m, fabsf(v[i]));
    return m;
  };
  for (int r = 0; r < rows; ++r) {
    const float* row = x + int64_t(r) * k;
    factor[r] = nvfp4 ? nvfp4_global_scale(largest(row, k)) : 1.f;
    for (int b = 0; b < k; b += block) {
      const float amax = largest(row + b, block);
      const Fp4Scale scale = nvfp4 ? nvfp4_scale(amax, factor[r]) : mxfp4_scale(amax);
      for (int i = b; i < b + block; ++i) values[int64_t(r) * k + i] = scale.quantized(row[i]);
    }
  }
}

// As fold_words, of int4 codes with a float32 scale each.
extern "C" void int4_words(const uint32_t* words, const float* scales, int count, uint32_t* out) {
  for (int i = 0; i < count; ++i) {
    int4_word(words[i], Int4Table(int4_magnitudes(scales[i])), out[2 * i], out[2 * i + 1]);
  }
}

// One word of each of the lanes of a quad, and what they do at once.
struct QuadWord {
  int lane[4];
};

struct SwapQuad {
  void operator()(QuadWord& low, QuadWord& high, int step) const {
    for (int l = 0; l < 4; ++l) {
      if (!(l & step)) std::swap(high.lane[l], low.lane[l | step]);
    }
  }
};

// column [16 * blocks]: the column whose fp8 code row_kernel stores at each byte of a row.
extern "C" void fp8_columns(int blocks, int* column) {
  for (int first = 0; first < blocks; first += 4) {
    QuadWord w[4];
    for (int i = 0; i < 4; ++i) {
      for (int t = 0; t < 4; ++t) w[i].lane[t] = kRowValues * (first + t) + 4 * i;
    }
    transpose_quad(w, SwapQuad());
    for (int t = 0; t < 4; ++t) {
      for (int i = 0; i < 16; ++i) column[kRowValues * (first + t) + i] = w[i / 4].lane[t] + i % 4;
    }
  }
}

// The same for 16-bit values: which column is stored at each of a row's.
extern "C" void half_columns(int blocks, int* column) {
  for (int first = 0; first < blocks; first += 4) {
    QuadWord w[8];
    for (int i = 0; i < 8; ++i) {
      for (int t = 0; t < 4; ++t) w[i].lane[t] = kRowValues * (first + t) + 2 * i;
    }
    exchange_halves(w, SwapQuad());
    for (int t = 0; t < 4; ++t) {
      for (int i = 0; i < 16; ++i) {
        column[half_column(first + t, i / 8) + i % 8] = w[i / 2].lane[t] + i % 2;
      }
    }
  }
}

// plan [2]: the lanes and blocks of row_plan; taken [2048]: how often its lanes take each block.
extern "C" void row_plan_of(int rows, int blocks, int* plan, int* taken) {
  const RowPlan p = row_plan(rows, blocks);
  plan[0] = p.lanes, plan[1] = p.blocks;
  for (int lane = 0; lane < p.lanes; ++lane) {
    for (int i = 0; i < p.blocks; ++i) ++taken[i * p.lanes + lane];
  }
}

extern "C" void quotients(const float* a, const float* d, const float* inverse, int count, float* out) {
  for (int i = 0; i < count; ++i) out[i] = quotient(a[i], d[i], inverse[i]);
}

// The fields of what launchers are given, and where they lie: "name offset" a line, and the size.
struct Field {
  const char* name;
  size_t offset;
};

template <size_t kCount>
void write_fields(const Field (&fields)[kCount], char* text) {
  for (const Field& field : fields) text += sprintf(text, "%s %zu\n", field.name, field.offset);
}

#define FP4_AT(field) {#field, offsetof(Fields, field)}

extern "C" void decode_fields(char* text) {
  using Fields = DecodeParams;
  write_fields({FP4_AT(x),
                FP4_AT(x_scale),
                FP4_AT(codes),
                FP4_AT(scales),
                FP4_AT(global_scale),
                FP4_AT(bias),
                FP4_AT(out),
                FP4_AT(route),
                FP4_AT(sorted_rows),
                FP4_AT(rows),
                FP4_AT(groups),
                FP4_AT(n),
                FP4_AT(k),
                FP4_AT(kp),
                FP4_AT(a_div),
                FP4_AT(max_m),
                FP4_AT(routing),
                FP4_AT(x_type),
                FP4_AT(out_type),
                FP4_AT(bias_type),
                FP4_AT(gate),
                FP4_AT(k_warps),
                FP4_AT(row_warps),
                FP4_AT(passes),
                FP4_AT(early),
                FP4_AT(bf16_words),
                {"launcher", offsetof(Fields, k_warps_inverse)},
                {"size", sizeof(Fields)}},
               text);
}

// begin: of every part, and the end of the last.
extern "C" void shares_of(int tiles, int steps, int share_below, int blocks, int* whole_left_parts,
                          int* begin) {
  const Shares shares(tiles, steps, share_below, blocks);
  whole_left_parts[0] = shares.whole, whole_left_parts[1] = shares.left, whole_left_parts[2] = shares.parts;
  for (int i = 0; shares.parts > 0 && i <= shares.parts; ++i) begin[i] = shares.begin(i);
}

extern "C" void prefill_fields(char* text) {
  using Fields = PrefillArguments;
  write_fields({FP4_AT(x),         FP4_AT(x_scale),      FP4_AT(codes),
                FP4_AT(scales),    FP4_AT(global_scale), FP4_AT(bias),
                FP4_AT(out),       FP4_AT(group_rows),   FP4_AT(workspace),
                FP4_AT(m),         FP4_AT(groups),       FP4_AT(n),
                FP4_AT(kp),        FP4_AT(mode),         FP4_AT(out_type),
                FP4_AT(bias_type), FP4_AT(gate),         FP4_AT(early),
                FP4_AT(config),    FP4_AT(stream),       {"size", sizeof(Fields)}},
               text);
}
