// The functions of qkv.h for kernels that are compiled at run time: warm-up, news of compiles, the folder on disk.
#include "api/c_types.hpp"
#include "qkv/compile.hpp"
#include "qkv/kernel_cache.hpp"
#include "qkv/warmup.hpp"

using namespace qkv;       // NOLINT(google-build-using-namespace): the definitions below are namesakes outside of it
using namespace qkv::api;  // NOLINT(google-build-using-namespace)

struct qkv_warmup_result {
  WarmupResult result;
};

struct qkv_cached_kernels {
  std::vector<CachedKernel> kernels;
};

namespace {

qkv_warmed_kernel to_c(const WarmedKernel& kernel) {
  return {kernel.name.c_str(), kernel.seconds, kernel.compiled ? 1 : 0, kernel.error.c_str()};
}

qkv_cached_kernel to_c(const CachedKernel& kernel) {
  return {kernel.path.c_str(), kernel.num_bytes,        kernel.last_used,    kernel.fault.c_str(),
          kernel.name.c_str(), kernel.compiler.c_str(), kernel.arch.c_str(), kernel.compile_seconds,
          kernel.registers,    kernel.spill_bytes};
}

// [count] specs, each by its address: their size is the caller's.
template <class Spec>
auto specs_from_c(const Spec* const* specs, int64_t count, const char* name) {
  std::vector<decltype(from_c(*specs))> result;
  for (const Spec* spec : copy_array(specs, count, name)) result.push_back(from_c(spec));
  return result;
}

WarmupOptions from_c(const qkv_warmup_options& given) {
  WarmupOptions options;
  if (given.arch != nullptr) options.arch = given.arch;
  options.device = {DeviceKind::cuda, given.device_index};
  if (given.max_query_len != 0) options.bounds.max_query_len = given.max_query_len;
  if (given.max_model_len != 0) options.bounds.max_model_len = given.max_model_len;
  if (given.planners < QKV_PLANNERS_NONE || given.planners > QKV_PLANNERS_DEVICE) {
    refuse("options.planners", given.planners, "0 (none), 1 (host) or 2 (device)");
  }
  options.planners = static_cast<PlannerUse>(given.planners);
  options.merge_states = is_set(given.merge_states);
  options.gather_cache = is_set(given.gather_cache);
  options.cache_write = is_set(given.cache_write);
  options.num_threads = given.num_threads;
  if (given.on_progress == nullptr) return options;
  options.on_progress = [on_progress = given.on_progress, context = given.progress_context](
                            int32_t done, int32_t total, const WarmedKernel& kernel) {
    const qkv_warmed_kernel news = to_c(kernel);
    const int32_t result = on_progress(context, done, total, &news);
    if (result != 0) refuse("on_progress", fmt::format("result {}", result), "0: go on", ErrorCode::unavailable);
  };
  return options;
}

template <class Element>
const Element& element_of(const std::vector<Element>& all, int64_t index) {
  const auto count = static_cast<int64_t>(all.size());
  if (index < 0 || index >= count) refuse("index", index, fmt::format("0 or more, below {}", count));
  return all[static_cast<size_t>(index)];
}

template <class Value, class Read>
qkv_status read_result(const qkv_warmup_result* result, Value* value, const char* name, const Read& read) noexcept {
  return guarded([&] { required(value, name) = read(required(result, "result").result); });
}

}  // namespace

void qkv_warmup_options_init(qkv_warmup_options* options, size_t struct_size) { init_sized(options, struct_size); }

qkv_status qkv_warmup(const qkv_layer_spec* const* layers, int64_t num_layers, const qkv_mla_spec* const* mla_layers,
                      int64_t num_mla_layers, const qkv_warmup_options* options, qkv_warmup_result** result) {
  return guarded([&] {
    required(result, "result") = nullptr;
    std::vector<LayerSpec> all = specs_from_c(layers, num_layers, "layers");
    WarmupOptions read = from_c(read_sized(options, offsetof(qkv_warmup_options, planners), "options"));
    for (const MlaSpec& spec : specs_from_c(mla_layers, num_mla_layers, "mla_layers")) {
      for (LayerSpec& layer : layers_of(spec)) all.push_back(std::move(layer));
      read.gather_cache = read.merge_states = true;
    }
    *result = new qkv_warmup_result{warmup(all, read)};
  });
}

void qkv_warmup_result_destroy(qkv_warmup_result* result) { delete result; }

qkv_status qkv_warmup_result_num_kernels(const qkv_warmup_result* result, int64_t* num_kernels) {
  return read_result(result, num_kernels, "num_kernels",
                     [](const WarmupResult& of) { return static_cast<int64_t>(of.kernels.size()); });
}

qkv_status qkv_warmup_result_kernel(const qkv_warmup_result* result, int64_t index, qkv_warmed_kernel* kernel) {
  return read_result(result, kernel, "kernel",
                     [&](const WarmupResult& of) { return to_c(element_of(of.kernels, index)); });
}

qkv_status qkv_warmup_result_num_skipped(const qkv_warmup_result* result, int64_t* num_skipped) {
  return read_result(result, num_skipped, "num_skipped",
                     [](const WarmupResult& of) { return static_cast<int64_t>(of.skipped.size()); });
}

qkv_status qkv_warmup_result_skipped(const qkv_warmup_result* result, int64_t index, const char** text) {
  return read_result(result, text, "text",
                     [&](const WarmupResult& of) { return element_of(of.skipped, index).c_str(); });
}

qkv_status qkv_warmup_result_seconds(const qkv_warmup_result* result, double* seconds) {
  return read_result(result, seconds, "seconds", [](const WarmupResult& of) { return of.seconds; });
}

qkv_status qkv_set_compile_callback(qkv_compile_callback callback, void* context) {
  return guarded([&] {
    if (callback == nullptr) {
      set_compile_callback({});
      return;
    }
    set_compile_callback([callback, context](const CompileEvent& event) {
      const qkv_compile_event news{static_cast<qkv_compile_event_kind>(event.kind),
                                   event.kernel.c_str(),
                                   event.arch.c_str(),
                                   event.index,
                                   event.seconds,
                                   event.registers,
                                   event.spill_bytes};
      callback(context, &news);
    });
  });
}

qkv_status qkv_num_compiles(int64_t* num_compiles) {
  return guarded([&] { required(num_compiles, "num_compiles") = qkv::num_compiles(); });
}

qkv_status qkv_kernel_cache_place(char* folder, size_t capacity, size_t* needed, int64_t* max_bytes) {
  return guarded([&] {
    const KernelCachePlace place = kernel_cache_place();
    if (max_bytes != nullptr) *max_bytes = place.max_bytes;
    copy_text(place.folder, folder, capacity, needed);
  });
}

qkv_status qkv_cached_kernels_list(qkv_cached_kernels** kernels) {
  return guarded([&] {
    required(kernels, "kernels") = nullptr;
    *kernels = new qkv_cached_kernels{cached_kernels()};
  });
}

void qkv_cached_kernels_destroy(qkv_cached_kernels* kernels) { delete kernels; }

qkv_status qkv_cached_kernels_count(const qkv_cached_kernels* kernels, int64_t* count) {
  return guarded([&] { required(count, "count") = static_cast<int64_t>(required(kernels, "kernels").kernels.size()); });
}

qkv_status qkv_cached_kernels_get(const qkv_cached_kernels* kernels, int64_t index, qkv_cached_kernel* kernel) {
  return guarded([&] { required(kernel, "kernel") = to_c(element_of(required(kernels, "kernels").kernels, index)); });
}

qkv_status qkv_clear_kernel_cache(int64_t* num_kernels) {
  return guarded([&] { required(num_kernels, "num_kernels") = clear_kernel_cache(); });
}

qkv_status qkv_export_kernels(const char* path, const char* arch, int64_t* num_kernels) {
  return guarded([&] {
    required(num_kernels, "num_kernels") = export_kernels(&required(path, "path"), arch == nullptr ? "" : arch);
  });
}

qkv_status qkv_import_kernels(const char* path, int64_t* num_kernels) {
  return guarded([&] { required(num_kernels, "num_kernels") = import_kernels(&required(path, "path")); });
}
