// Calls the Python operator if this GPU or layout has no native kernel. fp4_ops registers these operators as
// `fp4_python::NAME`, with the schemas of `fp4::NAME` (fp4_ops/backends/operators.py).
#pragma once

#include <string>
#include <string_view>

#include "cuda/host.h"

namespace fp4::cuda {

// Throws unless Python has registered these operators. `op`: the operator's name without its namespace.
// `why`: what has no native kernel.
void require_fallback(std::string_view op, std::string_view why);

// Returns and clears the message of the last error that Python raised in this thread.
std::string take_fallback_error();

template <class Result = Tensor, class... Arguments>
Result fallback(const char* op, std::string_view why, const Arguments&... arguments) {
  require_fallback(op, why);
  take_fallback_error();
  try {
    return call<Result>(std::string("fp4_python::") + op, "", arguments...);
  } catch (const std::exception&) {
    const std::string said = take_fallback_error();
    if (said.empty()) throw;
    throw std::runtime_error(said);
  }
}

// Returns the `why` for a layout that has no native kernel.
inline std::string layout_words(std::string_view layout) { return text("layout is '", layout, "'"); }

}  // namespace fp4::cuda
