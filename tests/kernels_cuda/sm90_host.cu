// What the Hopper kernels compute in registers, run on the host for test_sm90_host.py: no GPU is needed.
#include <cstring>
#include <utility>

#include "decode.cuh"
#include "e2m1_to_e4m3.cuh"
#include "fp4_block.cuh"
#include "gemv.cuh"
#include "interface.h"
#include "prefill_bf16.cuh"
#include "prefill_half.cuh"
#include "prefill_int4.cuh"
#include "prefill_schedule.cuh"
#include "row_values.cuh"
#include "weights.cuh"

using namespace fp4;
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
    dequantize_word(words[i], __low2half2(e4m3_pair(scales[i] & 0x7F)), pairs);
    memcpy(out + 8 * i, pairs, sizeof(pairs));
  }
}

template <class T>
T load(const void* from) {
  T value;
  memcpy(&value, from, sizeof(value));
  return value;
}

float value(uint32_t pair, int i, Element type) {
  const uint16_t bits = uint16_t(pair >> (16 * i));
  return type == Element::kBFloat16 ? __bfloat162float(reinterpret_cast<const __nv_bfloat16&>(bits))
                                    : __half2float(reinterpret_cast<const __half&>(bits));
}

// D += A x B of mma.sync.m16n8k16, whose fragments lie in the lanes as PTX says; a: one lane's.
void multiply(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Element type, float& even, float& odd) {
  for (int e = 0; e < 2; ++e) {
    even += value(a[0], e, type) * value(b0, e, type) + value(a[2], e, type) * value(b1, e, type);
    odd += value(a[1], e, type) * value(b0, e, type) + value(a[3], e, type) * value(b1, e, type);
  }
}

// What decode's lanes do with a weight [n, kp] and eight rows x [8, kp] of 16 bits: out [8, n].
template <class Words, DType kType>
void decode_product(const uint8_t* codes, const uint8_t* scales, const uint16_t* x, int n, int kp,
                    float* out) {
  const Words words;
  const int steps = kp / 64;
  memset(out, 0, sizeof(float) * 8 * n);
  for (int first = 0; first < steps; first += kSliceSteps) {
    uint4 fragments[kSliceSteps * 64];
    for (int token = 0; token < 8; ++token) {
      for (int block = 0; block < 4 * kSliceSteps; ++block) {
        RowBlock<kType, Words> raw = {};
        const int k = first * 64 + block * 16;
        if (k < kp) memcpy(raw.w, x + token * kp + k, sizeof(raw.w));
        raw.store(fragments, block / 4, token, block % 4, 1.f);
      }
    }
    for (int tile = 0; tile < n / 16; ++tile) {
      for (int lane = 0; lane < 32; ++lane) {
        typename Words::Scales scale;
        for (int j = 0; j < kSliceSteps && first + j < steps; ++j) {
          const int64_t step = int64_t(tile) * steps + first + j;
          uint32_t four = 0;  // or two
          const int bytes = sizeof(typename Words::ScaleBytes);
          memcpy(&four, scales + (step - j % 2) * Words::kStepScales + Words::scales_at(lane), bytes);
          if (j % Words::kScaleSteps == 0)
            scale = words.decode_scales(Words::without_flags(four) >> (16 * (j % 2)));
          uint32_t a[4][4];
          const int slot = Words::Layout::slot(lane / 4, lane % 4);
          words.dequantize(load<uint4>(codes + step * kStepCodes + slot * 16), scale, a);
          for (int token = 0; token < 8; ++token) {  // the lane that has its B
            const uint4* b = fragments + j * 64 + 4 * token + lane % 4;
            float* row = out + token * n + tile * 16 + lane / 4 * 2;
            for (int s = 0; s < 2; ++s) {
              multiply(a[2 * s], b[32 * s].x, b[32 * s].y, Words::kElement, row[0], row[1]);
              multiply(a[2 * s + 1], b[32 * s].z, b[32 * s].w, Words::kElement, row[0], row[1]);
            }
          }
        }
      }
    }
  }
}

extern "C" void decode_product(const uint8_t* codes, const uint8_t* scales, const uint16_t* x, int n, int kp,
                               int scale_block, int bf16, float* out) {
  const auto run = scale_block == 16 ? (bf16 ? decode_product<Bf16Words<16>, DType::kBFloat16>
                                             : decode_product<HalfWords<16>, DType::kFloat16>)
                                     : (bf16 ? decode_product<Bf16Words<32>, DType::kBFloat16>
                                             : decode_product<HalfWords<32>, DType::kFloat16>);
  run(codes, scales, x, n, kp, out);
}

// A weight [n, kp] of layout mma_bf16 as prefill's lanes make operand A of it: out [n, kp], by the row and K
// that wgmma.m64nNk16 gives to each element of a fragment, rows 2g and 2g + 1 in place of g and g + 8.
template <int kScaleBlock>
void bf16_operand(const uint8_t* codes, const uint8_t* scales, int n, int kp, float* out) {
  using Weights = Bf16Weights<kScaleBlock>;
  const int steps = kp / 128;
  for (int64_t at = 0; at < int64_t(n) / 16 * steps; ++at) {
    for (int lane = 0; lane < 32; ++lane) {
      const auto bytes =
          load<typename Weights::Scales>(scales + at * Weights::kTileScales + Weights::scales_at(lane));
      const typename Weights::Prepared halves[2] = {Weights::template decode<0>(bytes),
                                                    Weights::template decode<1>(bytes)};
      for (int i = 0; i < 4; ++i) {
        const auto word = load<uint2>(codes + at * 1024 + Weights::word_at(lane, i));
        uint32_t a[2][4];
        Bf16Words<kScaleBlock>::dequantize(word.x, word.y, halves[i / 2].pair[i % 2], a);
        for (int j = 0; j < 16; ++j) {
          const int instruction = 2 * i + j / 8, fragment = j / 2 % 4;
          const int row = at / steps * 16 + 2 * (lane / 4) + fragment % 2;
          const int k = at % steps * 128 + 16 * instruction + fragment / 2 * 8 + lane % 4 * 2 + j % 2;
          out[int64_t(row) * kp + k] =
              value(a[j / 8][fragment], j % 2, Element::kBFloat16) * Weights::kFactor;
        }
      }
    }
  }
}

extern "C" void bf16_operand(const uint8_t* codes, const uint8_t* scales, int n, int kp, int scale_block,
                             float* out) {
  (scale_block == 16 ? bf16_operand<16> : bf16_operand<32>)(codes, scales, n, kp, out);
}

// What the device's pack and dequantize do, lane by lane.
extern "C" void pack(const uint8_t* packed, const uint8_t* scales, int rows, int k, int kp, int scale_block,
                     int bf16, uint8_t* to_packed, uint8_t* to_scales) {
  for (int64_t i = 0; i < rows / 16 * (kp / kStep) * 32; ++i) {
    const auto lane = bf16 ? pack_lane<MmaBf16> : pack_lane<Sm90>;
    lane(i, packed, scales, k, kp, scale_block, to_packed, to_scales);
  }
}

extern "C" void dequantize(const uint8_t* packed, const uint8_t* scales, const float* global_scale, int rows,
                           int n, int kp, int scale_block, int bf16, double* out) {
  for (int64_t i = 0; i < rows / 16 * (kp / kStep) * 32; ++i) {
    const auto lane = bf16 ? dequantize_lane<MmaBf16, double> : dequantize_lane<Sm90, double>;
    lane(i, packed, scales, global_scale, n, kp, scale_block, out);
  }
}

// Bytes of shared memory that a decode launch asks for.
extern "C" void decode_bytes(int k_warps, int row_warps, int passes, int ring, int rows, int by_id,
                             int* bytes) {
  DecodeParams p;
  p.k_warps = k_warps, p.row_warps = row_warps, p.passes = passes, p.ring = ring, p.rows = rows;
  p.routing = by_id ? Routing::kIds32 : Routing::kOffs;
  *bytes = DecodeBuffers::bytes(p);
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

// begin: of every part, and the end of the last.
extern "C" void shares_of(int tiles, int steps, int share_below, int blocks, int* whole_left_parts,
                          int* begin) {
  const Shares shares(tiles, steps, share_below, blocks);
  whole_left_parts[0] = shares.whole, whole_left_parts[1] = shares.left, whole_left_parts[2] = shares.parts;
  for (int i = 0; shares.parts > 0 && i <= shares.parts; ++i) begin[i] = shares.begin(i);
}
