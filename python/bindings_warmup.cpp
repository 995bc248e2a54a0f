// Warm-up: what a run can reach is compiled before it begins. The interpreter is free meanwhile.
#include <nanobind/stl/function.h>

#include "bindings.hpp"

namespace qkv::python {
namespace {

using ProgressFunction = std::function<void(int32_t, int32_t, const WarmedKernel&)>;

PlannerUse parse_planners(const std::string& name) {
  if (name == "none") return PlannerUse::none;
  if (name == "host") return PlannerUse::host;
  if (name == "device") return PlannerUse::device;
  throw Error(ErrorCode::invalid_argument, "planners", name, "none, host or device");
}

WarmupResult warm_up(const std::vector<std::variant<LayerSpec, MlaSpec>>& specs, const std::string& device,
                     const std::string& arch, const RequestBounds& bounds, const std::string& planners,
                     bool merge_states, bool gather_cache, bool cache_write, int32_t num_threads,
                     const std::optional<ProgressFunction>& on_progress) {
  WarmupOptions options;
  options.arch = arch;
  options.device = parse_device(device);
  options.bounds = bounds;
  options.planners = parse_planners(planners);
  options.merge_states = merge_states;
  options.gather_cache = gather_cache;
  options.cache_write = cache_write;
  options.num_threads = num_threads;
  if (on_progress) options.on_progress = *on_progress;  // takes the interpreter by itself
  nb::gil_scoped_release released;
  std::vector<LayerSpec> layers;
  for (const auto& spec : specs) {
    if (const auto* layer = std::get_if<LayerSpec>(&spec)) {
      layers.push_back(*layer);
      continue;
    }
    for (LayerSpec& layer : layers_of(std::get<MlaSpec>(spec))) layers.push_back(std::move(layer));
    options.gather_cache = options.merge_states = true;
  }
  return warmup(layers, options);
}

void bind_types(nb::module_& module) {
  nb::class_<RequestBounds>(module, "RequestBounds",
                            "What is known of all requests to come; None: no bound. A request outside is served as "
                            "well, by a kernel that is compiled then.")
      .def(
          "__init__",
          [](RequestBounds* self, std::optional<int32_t> max_query_len, std::optional<int32_t> max_model_len) {
            new (self) RequestBounds{max_query_len.value_or(INT32_MAX), max_model_len.value_or(INT32_MAX)};
          },
          nb::arg("max_query_len") = nb::none(), nb::arg("max_model_len") = nb::none(),
          "max_query_len: new tokens in one step. max_model_len: keys, cached and new.")
      .def_ro("max_query_len", &RequestBounds::max_query_len)
      .def_ro("max_model_len", &RequestBounds::max_model_len);
  nb::class_<WarmedKernel>(module, "WarmedKernel", "A kernel that the layers' batches can reach.")
      .def_ro("name", &WarmedKernel::name)
      .def_ro("seconds", &WarmedKernel::seconds, "That it took to have it.")
      .def_ro("compiled", &WarmedKernel::compiled, "Else it was found on disk or in the process.")
      .def_ro("error", &WarmedKernel::error, "Why there is none; empty: it is there.");
  nb::class_<WarmupResult>(module, "WarmupResult")
      .def_ro("kernels", &WarmupResult::kernels, "In the order of the layers, each kernel once.")
      .def_ro("skipped", &WarmupResult::skipped, "Layers that cannot run there: which, and the first reason.")
      .def_ro("seconds", &WarmupResult::seconds);
}

}  // namespace

void bind_warmup(nb::module_& module) {
  bind_types(module);
  module.def(
      "warmup", &warm_up, nb::arg("layers"), nb::kw_only(), nb::arg("device") = "cuda", nb::arg("arch") = "",
      nb::arg("bounds") = RequestBounds{}, nb::arg("planners") = "none", nb::arg("merge_states") = false,
      nb::arg("gather_cache") = false, nb::arg("cache_write") = false, nb::arg("num_threads") = 0,
      nb::arg("on_progress") = nb::none(),
      "Compiles all kernels that batches of these layers can reach, and keeps them on disk and in the process.\n\n"
      "layers: LayerSpecs and MlaSpecs; the latter's gathers and merges are compiled with them.\n"
      "planners: \"host\", \"device\" (plans_on_device) or \"none\". merge_states, gather_cache, cache_write: whether "
      "the run makes these calls.\n"
      "arch: such as \"sm_90a\": no GPU is needed then; empty: the device's. num_threads: 0 = num_threads().\n"
      "on_progress: called with (done, total, kernel) after each kernel; what it raises ends the warm-up.");
  module.def("num_compiles", &num_compiles,
             "How often this process has started the compiler. It stays where it is once all kernels are known.");
}

}  // namespace qkv::python
