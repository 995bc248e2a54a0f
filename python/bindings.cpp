// The Python module _qkv: the calls of the C++ library under the same names. The package qkv re-exports it.
#include "bindings.hpp"

#include <exception>

namespace qkv::python {
namespace {

// Raises qkv.Error with its four fields. Looked up when needed: the class lives in Python, beside its documentation.
void translate_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("qkv.error").attr("Error");
    const std::string code(to_string(error.code()));
    const nb::object instance = type(code, error.argument(), error.value(), error.allowed());
    PyErr_SetObject(type.ptr(), instance.ptr());
  }
}

void bind_device(nb::module_& module) {
  module.def("instruction_sets", &instruction_sets,
             "Instruction sets compiled in that this CPU has, best first. QKV_FORCE=<name> picks one.");
  module.def("instruction_set_in_use", &instruction_set_in_use, "The one that calls run on.");
  module.def("set_num_threads", &set_num_threads, nb::arg("num_threads"),
             "Threads of the CPU engine; 0 = QKV_THREADS, else all that the process may use. Results do not depend on "
             "it, bit for bit.");
  module.def("num_threads", &num_threads, "Threads that calls run on.");
  module.def("version", &version, "The library's version.");
  module.def("info", &info, "Version, instruction sets, threads and environment names that are set, a line each.");
}

}  // namespace

DType parse_dtype(const std::string& name, const char* argument) {
  for (const DType dtype :
       {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2, DType::i8, DType::i32, DType::i64}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw Error(ErrorCode::invalid_argument, argument, "\"" + name + "\"",
              "\"f32\", \"f16\", \"bf16\", \"f8e4m3\", \"f8e5m2\" or \"i8\"");
}

Device parse_device(const std::string& name) {
  if (name == "cpu") return {};
  if (name == "cuda") return {DeviceKind::cuda, 0};
  const std::string prefix = "cuda:";
  const std::string index = name.starts_with(prefix) ? name.substr(prefix.size()) : "";
  if (index.empty() || index.size() > 4 || index.find_first_not_of("0123456789") != std::string::npos) {
    throw Error(ErrorCode::invalid_argument, "device", "\"" + name + "\"", "\"cpu\", \"cuda\" or \"cuda:<index>\"");
  }
  return {DeviceKind::cuda, std::stoi(index)};
}

}  // namespace qkv::python

NB_MODULE(_qkv, module) {
  module.doc() = "Attention engine for LLM serving. Use it through the package qkv.";
  nanobind::register_exception_translator(qkv::python::translate_error);
  qkv::python::bind_device(module);
  qkv::python::bind_mask(module);
  qkv::python::bind_layer(module);
  qkv::python::bind_warmup(module);
  qkv::python::bind_attention(module);
  qkv::python::bind_ops(module);
  qkv::python::bind_collectives(module);
  qkv::python::bind_mla(module);
  qkv::python::bind_context_parallel(module);
  qkv::python::bind_mla_context_parallel(module);
}
