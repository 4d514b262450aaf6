// ggml KERNEL ROWS REPEATS: ggml's products of 16 x 2048 weights with so many rows of q8_0.
#include <cstdlib>
#include <string>
#include <vector>

extern "C" {
#define PRODUCT(name) void name(int, float*, size_t, const void*, const void*, int, int)
PRODUCT(ggml_gemv_q4_0_4x4_q8_0);
PRODUCT(ggml_gemm_q4_0_4x4_q8_0);
PRODUCT(ggml_gemv_q4_0_4x8_q8_0);
PRODUCT(ggml_gemm_q4_0_4x8_q8_0);
PRODUCT(ggml_gemv_mxfp4_4x4_q8_0);
PRODUCT(ggml_gemm_mxfp4_4x4_q8_0);
#define DOT(name) void name(int, float*, size_t, const void*, size_t, const void*, size_t, int)
DOT(ggml_vec_dot_q4_0_q8_0);
DOT(ggml_vec_dot_mxfp4_q8_0);
DOT(ggml_vec_dot_nvfp4_q8_0);
// The tables that ggml-cpu.c fills at the start; its other functions are not called.
float ggml_table_f32_f16[1 << 16];
float ggml_table_f32_e8m0_half[1 << 8];
float ggml_table_f32_ue4m3[1 << 7];
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string kernel = argv[1];
  const int rows = std::atoi(argv[2]), repeats = std::atoi(argv[3]);
  constexpr int k = 2048, n = 16, row_bytes = k / 32 * 34;
  const std::vector<char> weights(n * k), activations(rows * row_bytes);
  std::vector<float> out(rows * n);
  const auto repacked = [&](auto* gemv, auto* gemm) {
    for (int i = 0; i < repeats; ++i)
      if (rows == 1)
        gemv(k, out.data(), n, weights.data(), activations.data(), 1, n);
      else
        gemm(k, out.data(), n, weights.data(), activations.data(), rows, n);
  };
  // The plain types, which ggml multiplies a row of the weight with one or two of the activations at a time.
  const auto plain = [&](auto* dot, int at_once) {
    at_once = rows == 1 ? 1 : at_once;
    for (int i = 0; i < repeats; ++i)
      for (int m = 0; m < rows; m += at_once)
        for (int r = 0; r < n; r += at_once)
          dot(k, out.data() + m * n + r, n, weights.data() + r * k / 2, k / 2,
              activations.data() + m * row_bytes, row_bytes, at_once);
  };
  if (kernel == "q4_0_4x4")
    repacked(ggml_gemv_q4_0_4x4_q8_0, ggml_gemm_q4_0_4x4_q8_0);
  else if (kernel == "q4_0_4x8")
    repacked(ggml_gemv_q4_0_4x8_q8_0, ggml_gemm_q4_0_4x8_q8_0);
  else if (kernel == "mxfp4_4x4")
    repacked(ggml_gemv_mxfp4_4x4_q8_0, ggml_gemm_mxfp4_4x4_q8_0);
  else if (kernel == "q4_0")
    plain(ggml_vec_dot_q4_0_q8_0, 1);
  else if (kernel == "q4_0_pairs")
    plain(ggml_vec_dot_q4_0_q8_0, 2);
  else if (kernel == "mxfp4")
    plain(ggml_vec_dot_mxfp4_q8_0, 1);
  else if (kernel == "nvfp4")
    plain(ggml_vec_dot_nvfp4_q8_0, 1);
  else
    return 2;
}
