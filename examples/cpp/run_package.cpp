// Runs an AOTInductor package of a 4-bit model, without Python, and compares its answers with those in a
// file.
//
//   run_package MODEL.pt2 EXPECTED.pt LIBRARY...
//
// MODEL.pt2 and EXPECTED.pt: what make_package.py writes. LIBRARY: what `python -m fp4_ops libraries` prints;
// loading one registers its operators. Prints a line for each example, and ends with 1 if an answer differs
// in any bit.
#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void load_operators(const char* library) {
  // RTLD_GLOBAL is not needed: a library registers its operators with torch while it is loaded.
  if (dlopen(library, RTLD_NOW) == nullptr) throw std::runtime_error(dlerror());
}

// A list of pairs: the input of a call, and what it must give.
c10::List<c10::IValue> read_examples(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return torch::jit::pickle_load(bytes).toList();
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         at::equal(a.cpu().contiguous().view(at::kByte), b.cpu().contiguous().view(at::kByte));
}

int run(const char* model, const char* expected) {
  c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader loader(model);
  bool all_same = true;
  for (const c10::IValue& example : read_examples(expected)) {
    const auto& pair = example.toTupleRef().elements();
    const at::Tensor input = pair[0].toTensor(), want = pair[1].toTensor();
    const at::Tensor got = loader.run({input})[0];
    const bool same = same_bits(got, want);
    all_same &= same;
    std::cout << input.sizes() << " on " << got.device() << (same ? ": the same bits\n" : ": DIFFERS\n");
  }
  return all_same ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: run_package MODEL.pt2 EXPECTED.pt LIBRARY...\n";
    return 2;
  }
  try {
    for (int i = 3; i < argc; ++i) load_operators(argv[i]);
    return run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
