// The experts of each token: the arguments of a launch. Needs neither torch nor CUDA.
#pragma once

#include <cstdint>

#include "interface.h"

namespace fp4::device {

constexpr int kMostChosen = 16;   // experts of a token
constexpr int kMostScored = 512;  // experts in all

struct TopExpertsParams {
  const void* logits = nullptr;  // [rows, experts] of `type`
  void* weights = nullptr;       // [rows, k] of weight_type
  int64_t* ids = nullptr;        // [rows, k]
  int rows = 0, experts = 0, k = 0;
  DType type = DType::kFloat32, weight_type = DType::kFloat32;
  bool softmax = false;    // a weight is its softmax among all experts, else the logit itself
  bool normalize = false;  // the weights of a token are divided by their sum
};

}  // namespace fp4::device

extern "C" {
int fp4_kernel_top_experts(const fp4::device::TopExpertsParams* params, void* stream);
}
