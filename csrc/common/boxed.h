// Registration of a kernel: m.impl("name", FP4_BOX(kernel)).
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <exception>
#include <string>

namespace fp4 {

// A kernel in the stable ABI's calling convention, which has no way to return an error: it must throw. But no
// exception object of this library may reach libtorch, because the two may use different C++ runtimes. Our
// exceptions are therefore caught here, and libtorch throws its own with the same message: a RuntimeError in
// Python.
template <auto kernel>
void boxed(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  std::string message;
  try {
    return TORCH_BOX(kernel)(stack, num_args, num_outputs);
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "an exception of unknown type";
  }
  aoti_torch_check(false, "", "", 0, message.c_str());
}

}  // namespace fp4

#define FP4_BOX(kernel) fp4::boxed<&kernel>
