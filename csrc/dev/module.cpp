// `fp4_ops.dev._native`: the host-only C++, for tests, benchmarks and tools. It uses the structures of the
// operators and kernels, not copies of them. No wheel has this module (setup.py), so it may depend
// on one version of Python; it has a planner of its own, beside that of `_C_cuda.so`, and needs neither torch
// nor CUDA.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/choice.h"
#include "cuda/constants.h"
#include "cuda/library.h"
#include "device/few_rows.h"

namespace py = pybind11;

namespace fp4::cuda {
namespace {

// Defines a field that is a pointer. In Python it is an integer (Tensor.data_ptr()), and None is null.
template <class Struct, class Pointer>
void pointer(py::class_<Struct>& c, const char* name, Pointer Struct::* field) {
  c.def_property(
      name, [field](const Struct& s) { return std::bit_cast<uintptr_t>(s.*field); },
      [field](Struct& s, std::optional<uintptr_t> to) { s.*field = std::bit_cast<Pointer>(to.value_or(0)); });
}

// Defines the class of a launcher's arguments. Python sets its fields by name, and passes its `address`.
template <class Struct>
py::class_<Struct> parameters(py::module_& m, const char* name) {
  py::class_<Struct> c(m, name);
  c.def(py::init([name](const py::kwargs& fields) {
    Struct made = {};
    const py::object self = py::cast(&made, py::return_value_policy::reference);
    for (const auto& [field, value] : fields) {
      if (!py::hasattr(self, field))
        throw py::type_error(std::string(name) + " has no field " + std::string(py::str(field)));
      py::setattr(self, field, value);
    }
    return made;
  }));
  c.def_property_readonly("address", [](const Struct& s) { return reinterpret_cast<uintptr_t>(&s); });
  return c;
}

// Defines the fields that all launches of decode and gemv have, except those that the launcher sets itself.
template <class Struct>
py::class_<Struct> product_parameters(py::module_& m, const char* name) {
  py::class_<Struct> c = parameters<Struct>(m, name);
  pointer<Struct, const void*>(c, "x", &Struct::x);
  pointer<Struct, const float*>(c, "x_scale", &Struct::x_scale);
  pointer<Struct, const uint8_t*>(c, "codes", &Struct::codes);
  pointer<Struct, const uint8_t*>(c, "scales", &Struct::scales);
  pointer<Struct, const float*>(c, "global_scale", &Struct::global_scale);
  pointer<Struct, const void*>(c, "bias", &Struct::bias);
  pointer<Struct, void*>(c, "out", &Struct::out);
  pointer<Struct, const void*>(c, "route", &Struct::route);
  c.def_readwrite("rows", &Struct::rows)
      .def_readwrite("groups", &Struct::groups)
      .def_readwrite("n", &Struct::n)
      .def_readwrite("k", &Struct::k)
      .def_readwrite("kp", &Struct::kp)
      .def_readwrite("a_div", &Struct::a_div)
      .def_readwrite("routing", &Struct::routing)
      .def_readwrite("x_type", &Struct::x_type)
      .def_readwrite("out_type", &Struct::out_type)
      .def_readwrite("bias_type", &Struct::bias_type)
      .def_readwrite("gate", &Struct::gate)
      .def_readwrite("scale_block", &Struct::scale_block)
      .def_readwrite("early", &Struct::early)
      .def_readwrite("bf16_words", &Struct::bf16_words);
  return c;
}

void add_enums(py::module_& m) {
  using namespace device;
  py::native_enum<Routing>(m, "Routing", "enum.IntEnum")
      .value("OFFS", Routing::kOffs)
      .value("IDS32", Routing::kIds32)
      .value("IDS64", Routing::kIds64)
      .value("MASKED", Routing::kMasked)
      .value("DENSE", Routing::kDense)
      .finalize();
  py::native_enum<RowMode>(m, "RowMode", "enum.IntEnum")
      .value("DENSE", RowMode::kDense)
      .value("CONTIGUOUS", RowMode::kContiguous)
      .value("MASKED", RowMode::kMasked)
      .finalize();
  py::native_enum<DType>(m, "DType", "enum.IntEnum")
      .value("FLOAT32", DType::kFloat32)
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT16", DType::kFloat16)
      .value("FLOAT8", DType::kFloat8)
      .finalize();
  py::native_enum<Act>(m, "Act", "enum.IntEnum")
      .value("NONE", Act::kNone)
      .value("SILU", Act::kSilu)
      .value("GELU", Act::kGelu)
      .value("GELU_TANH", Act::kGeluTanh)
      .finalize();
  py::native_enum<Form>(m, "Form", "enum.IntEnum")
      .value("SAME", Form::kSame)
      .value("FP8", Form::kFp8)
      .value("HALF", Form::kHalf)
      .finalize();
  py::native_enum<PrefillKernel>(m, "PrefillKernel", "enum.IntEnum")
      .value("w4a8", PrefillKernel::kFp8)
      .value("w4a8_b32", PrefillKernel::kFp8B32)
      .value("half", PrefillKernel::kHalf)
      .value("half_b32", PrefillKernel::kHalfB32)
      .value("bf16", PrefillKernel::kBf16)
      .value("bf16_b32", PrefillKernel::kBf16B32)
      .value("int4", PrefillKernel::kInt4)
      .value("int4_g64", PrefillKernel::kInt4G64)
      .value("int4_g32", PrefillKernel::kInt4G32)
      .value("fp16", PrefillKernel::kFp16)
      .value("fp16_b32", PrefillKernel::kFp16B32)
      .value("int8", PrefillKernel::kInt8)
      .value("int8_b32", PrefillKernel::kInt8B32)
      .finalize();
  py::native_enum<Kernel>(m, "Kernel", "enum.IntEnum")
      .value("w4a8", Kernel::kFp8)
      .value("half", Kernel::kHalf)
      .value("bf16", Kernel::kBf16)
      .finalize();
  py::native_enum<Family>(m, "Family", "enum.IntEnum")
      .value("prefill", Family::kPrefill)
      .value("decode", Family::kDecode)
      .value("gemv", Family::kGemv)
      .finalize();
  py::native_enum<KernelFamily>(m, "KernelFamily", "enum.IntEnum")
      .value("NONE", KernelFamily::kNone)
      .value("MMA", KernelFamily{80})
      .value("HOPPER", KernelFamily::kHopper)
      .finalize();
  m.attr("FEW_WARPS") = kFewComputeWarps;
  m.attr("MANY_WARPS") = kManyComputeWarps;
  m.attr("MAX_IDS") = kMaxIds;
}

void add_launches(py::module_& m) {
  using namespace device;
  py::class_<Gate>(m, "Gate")
      .def(py::init([](Act act, float alpha, float limit, float up_offset) {
             return Gate{act, alpha, limit, up_offset};
           }),
           py::arg("act") = Act::kNone, py::arg("alpha") = 1, py::arg("limit") = 0, py::arg("up_offset") = 0)
      .def_readwrite("act", &Gate::act);

  auto decode = product_parameters<DecodeParams>(m, "DecodeParams");
  pointer(decode, "sorted_rows", &DecodeParams::sorted_rows);
  decode.def_readwrite("max_m", &DecodeParams::max_m)
      .def_readwrite("k_warps", &DecodeParams::k_warps)
      .def_readwrite("row_warps", &DecodeParams::row_warps)
      .def_readwrite("passes", &DecodeParams::passes)
      .def_readwrite("ring", &DecodeParams::ring);

  auto gemv = product_parameters<GemvParams>(m, "GemvParams");
  pointer(gemv, "topk_weights", &GemvParams::topk_weights);
  gemv.def_readwrite("weight_type", &GemvParams::weight_type)
      .def_readwrite("top_k", &GemvParams::top_k)
      .def_readwrite("tokens", &GemvParams::tokens)
      .def_readwrite("columns", &GemvParams::columns)
      .def_readwrite("slices", &GemvParams::slices)
      .def_readwrite("tiles", &GemvParams::tiles);

  using Prefill = PrefillArguments;
  auto prefill = parameters<Prefill>(m, "PrefillArguments");
  pointer(prefill, "x", &Prefill::x);
  pointer(prefill, "x_scale", &Prefill::x_scale);
  pointer(prefill, "codes", &Prefill::codes);
  pointer(prefill, "scales", &Prefill::scales);
  pointer(prefill, "global_scale", &Prefill::global_scale);
  pointer(prefill, "bias", &Prefill::bias);
  pointer(prefill, "out", &Prefill::out);
  pointer(prefill, "group_rows", &Prefill::group_rows);
  pointer(prefill, "workspace", &Prefill::workspace);
  pointer(prefill, "stream", &Prefill::stream);
  prefill.def_readwrite("m", &Prefill::m)
      .def_readwrite("groups", &Prefill::groups)
      .def_readwrite("n", &Prefill::n)
      .def_readwrite("k", &Prefill::k)
      .def_readwrite("kp", &Prefill::kp)
      .def_readwrite("mode", &Prefill::mode)
      .def_readwrite("out_type", &Prefill::out_type)
      .def_readwrite("bias_type", &Prefill::bias_type)
      .def_readwrite("gate", &Prefill::gate)
      .def_readwrite("early", &Prefill::early)
      .def_readwrite("leaves_rest", &Prefill::leaves_rest)
      .def_readwrite("whole_tiles", &Prefill::whole_tiles)
      .def_readwrite("config", &Prefill::config);

  py::class_<Choice>(m, "Choice")
      .def_readonly("candidate", &Choice::candidate)
      .def_property_readonly("seconds", [](const Choice& c) { return c.estimate.seconds; })
      .def_property_readonly("share_below", [](const Choice& c) { return c.estimate.share_below; })
      .def_property_readonly("tile_width", [](const Choice& c) { return c.estimate.tile_width; })
      .def_property_readonly("claims", [](const Choice& c) { return c.estimate.claims; });
  // `function` is the address of fp4_kernel_prefill_choose in a library of kernels that Python has loaded.
  m.def("prefill_choose", [](uintptr_t function, PrefillKernel kernel, RowMode mode, int groups, int m, int n,
                             int kp, int sms, int config) {
    const auto choose = reinterpret_cast<decltype(&fp4_kernel_prefill_choose)>(function);
    return choose(int(kernel), int(mode), groups, m, n, kp, sms, config);
  });
}

std::string text(const DecodeConfig& c) {
  return "decode: " + std::to_string(c.k_warps) + " x " + std::to_string(c.row_warps) +
         " warps (K x rows), " + std::to_string(c.passes) + (c.passes > 1 ? " passes" : " pass");
}

void add_planner(py::module_& m) {
  py::class_<Gpu>(m, "Gpu")
      .def(py::init([](KernelFamily family, int sms, int shared_bytes, int copy_rate, int constants) {
             return Gpu{family, sms, shared_bytes, copy_rate, constants};
           }),
           py::arg("family"), py::arg("sms"), py::arg("shared_bytes") = Gpu().shared_bytes,
           py::arg("copy_rate") = 0, py::arg("constants") = 0)
      .def(py::init([](int sms) { return Gpu{.sms = sms}; }))  // a Hopper GPU
      .def_readonly("family", &Gpu::family)
      .def_readonly("sms", &Gpu::sms)
      .def_readonly("shared_bytes", &Gpu::shared_bytes)
      .def_readonly("copy_rate", &Gpu::copy_rate)
      .def_readonly("constants", &Gpu::constants);
  py::implicitly_convertible<int, Gpu>();

  py::class_<DecodeConfig>(m, "DecodeConfig")
      .def(py::init([](int k_warps, int row_warps, int passes, int ring, int ids) {
        return DecodeConfig{k_warps, row_warps, passes, ring, ids};
      }))
      .def_readonly("k_warps", &DecodeConfig::k_warps)
      .def_readonly("row_warps", &DecodeConfig::row_warps)
      .def_readonly("passes", &DecodeConfig::passes)
      .def_readonly("ring", &DecodeConfig::ring)
      .def_readonly("ids", &DecodeConfig::ids)
      .def_property_readonly("shared_bytes", &DecodeConfig::shared_bytes)
      .def("__eq__", [](const DecodeConfig& a, const DecodeConfig& b) { return a == b; })
      .def("__repr__", &text);
  py::class_<GemvConfig>(m, "GemvConfig")
      .def_readonly("columns", &GemvConfig::columns)
      .def_readonly("slices", &GemvConfig::slices)
      .def_readonly("tiles", &GemvConfig::tiles)
      .def_property_readonly("units", &GemvConfig::units)
      .def_property_readonly("shared_bytes", &GemvConfig::shared_bytes)
      .def("__eq__", [](const GemvConfig& a, const GemvConfig& b) { return a == b; })
      .def("__repr__", [](const GemvConfig& c) {
        return "gemv: " + std::to_string(c.units()) + " units of 16 x 256 a block";
      });
  py::class_<Product>(m, "Product")
      .def(py::init([](Routing routing, int groups, int rows, int n, int kp, int block) {
             return Product{routing, groups, rows, n, kp, block};
           }),
           py::arg("routing"), py::arg("groups"), py::arg("rows"), py::arg("n"), py::arg("kp"),
           py::arg("block") = 16);
  py::class_<ProductPlan>(m, "ProductPlan")
      .def_readonly("family", &ProductPlan::family)
      .def_readonly("decode", &ProductPlan::decode)
      .def_readonly("gemv", &ProductPlan::gemv)
      .def("__eq__", [](const ProductPlan& a, const ProductPlan& b) {
        return a.family == b.family && a.decode == b.decode && a.gemv == b.gemv;
      });
  py::class_<BlockPlan>(m, "BlockPlan")
      .def_readonly("few", &BlockPlan::few)
      .def_readonly("gemv", &BlockPlan::gemv)
      .def_readonly("up", &BlockPlan::up)
      .def_readonly("down", &BlockPlan::down);

  m.def("decode_us", &decode_us, py::arg("product"), py::arg("kernel"), py::arg("gpu"));
  m.def("prefill_us", &prefill_us, py::arg("product"), py::arg("kernel"), py::arg("gpu"));
  m.def("plan",
        [](const Product& product, Kernel kernel, const Gpu& gpu) { return plan(product, kernel, gpu); });
  m.def("block_plan", [](const Product& up, const Product& down, int top_k, const std::string& a_format,
                         const Gpu& gpu, bool bf16, bool prefill_alone) {
    return plan(Block{up, down, top_k, bf16, prefill_alone, index_of(a_format)}, gpu);
  });
  m.def("decode_config", &choose_decode);
  m.def("decode_warps", &decode_warps_for);
  m.def("gemv_config", &configure_gemv);
  m.def("set_only", [](int only) { set_only(Only(only)); });
  m.def("use_kernels", &use_kernels);
  m.def("add_tuned", [](const std::string& device, KernelFamily family, const std::vector<double>& numbers) {
    PlannerConstants constants;
    if (numbers.size() * sizeof(double) != sizeof(constants))
      throw py::value_error("constants of another build");
    std::memcpy(&constants, numbers.data(), sizeof(constants));
    return add_tuned(device, family, constants);
  });
  m.def("gpu", [](int index) { return device_kind(index).gpu; });
}

}  // namespace
}  // namespace fp4::cuda

PYBIND11_MODULE(_native, m) {
  fp4::cuda::add_enums(m);
  fp4::cuda::add_launches(m);
  fp4::cuda::add_planner(m);
}
