// Warm-up, news of compiles and the folder of compiled kernels through the C interface: what the C++ calls say.
#include <gmock/gmock.h>

#include "c_api/c_structs.hpp"
#include "jit/cache_folder.hpp"
#include "jit/needs_nvrtc.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::CSpec;
using testing::expect_ok;
using testing::text_of;

struct DestroyKernels {
  void operator()(qkv_warmup_result* result) const { qkv_warmup_result_destroy(result); }
  void operator()(qkv_cached_kernels* kernels) const { qkv_cached_kernels_destroy(kernels); }
};
using ResultHandle = std::unique_ptr<qkv_warmup_result, DestroyKernels>;
using KernelsHandle = std::unique_ptr<qkv_cached_kernels, DestroyKernels>;

LayerSpec gpu_layer(int32_t head_dim) {
  LayerSpec layer = testing::layer_of(4, 2, head_dim);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.cache = CacheSpec{16};
  return layer;
}

qkv_warmup_options for_sm80() {
  qkv_warmup_options options;
  qkv_warmup_options_init(&options, sizeof options);
  options.arch = "sm_80";
  return options;
}

qkv_mla_spec mla_spec() {
  qkv_mla_spec spec;
  qkv_mla_spec_init(&spec, sizeof spec);
  spec.num_heads = 2;
  spec.qk_nope_head_dim = spec.v_head_dim = 16;
  spec.kv_lora_rank = 32;
  spec.dtype = QKV_BF16;
  spec.page_size = 16;
  return spec;
}

std::vector<std::string> names_of(const ResultHandle& result) {
  int64_t count = 0;
  expect_ok(qkv_warmup_result_num_kernels(result.get(), &count));
  std::vector<std::string> names;
  for (int64_t i = 0; i < count; ++i) {
    qkv_warmed_kernel kernel;
    expect_ok(qkv_warmup_result_kernel(result.get(), i, &kernel));
    EXPECT_STREQ(kernel.error, "");
    names.emplace_back(kernel.name);
  }
  return names;
}

int32_t keep_name(void* context, int32_t, int32_t, const qkv_warmed_kernel* kernel) {
  static_cast<std::vector<std::string>*>(context)->emplace_back(kernel->name);
  return 0;
}

int32_t stop(void*, int32_t, int32_t, const qkv_warmed_kernel*) { return 5; }

void count_event(void* context, const qkv_compile_event*) { ++*static_cast<int64_t*>(context); }

class c_warmup : public NeedsNvrtc {
 protected:
  c_warmup() { expect_ok(qkv_set_compile_callback(count_event, &num_events)); }
  ~c_warmup() override { expect_ok(qkv_set_compile_callback(nullptr, nullptr)); }
  int64_t num_events = 0;
};

TEST_F(c_warmup, makes_ready_what_its_cpp_namesake_does_and_tells_each_kernel) {
  const CSpec spec(gpu_layer(32));
  const qkv_mla_spec mla = mla_spec();
  const qkv_layer_spec* layers[] = {&spec.spec};
  const qkv_mla_spec* mla_layers[] = {&mla};
  std::vector<std::string> told;
  qkv_warmup_options options = for_sm80();
  options.on_progress = keep_name;
  options.progress_context = &told;
  options.planners = QKV_PLANNERS_DEVICE;
  options.max_model_len = 4096;
  qkv_warmup_result* made = nullptr;
  expect_ok(qkv_warmup(layers, 1, mla_layers, 1, &options, &made));
  const ResultHandle result(made);

  MlaSpec mla_cpp;
  mla_cpp.num_heads = 2;
  mla_cpp.qk_nope_head_dim = mla_cpp.v_head_dim = 16;
  mla_cpp.kv_lora_rank = 32;
  std::vector<LayerSpec> all = {gpu_layer(32)};
  for (const LayerSpec& layer : layers_of(mla_cpp)) all.push_back(layer);
  WarmupOptions same;
  same.arch = "sm_80";
  same.bounds.max_model_len = 4096;
  same.planners = PlannerUse::device;
  same.gather_cache = same.merge_states = true;
  std::vector<std::string> expected;
  for (const WarmedKernel& kernel : warmup(all, same).kernels) expected.push_back(kernel.name);
  EXPECT_EQ(names_of(result), expected);
  EXPECT_THAT(told, ::testing::UnorderedElementsAreArray(expected));
  EXPECT_THAT(expected, ::testing::Contains("gather sm_80"));
  EXPECT_GE(num_events, static_cast<int64_t>(expected.size()));  // a start and an end, or from disk

  int64_t before = 0, after = 0;
  expect_ok(qkv_num_compiles(&before));
  qkv_warmup_result* again = nullptr;
  expect_ok(qkv_warmup(layers, 1, mla_layers, 1, &options, &again));
  qkv_warmup_result_destroy(again);
  expect_ok(qkv_num_compiles(&after));
  EXPECT_EQ(after, before);
  double seconds = -1;
  expect_ok(qkv_warmup_result_seconds(result.get(), &seconds));
  EXPECT_GE(seconds, 0);
}

TEST_F(c_warmup, a_result_of_the_callback_ends_it) {
  const CSpec spec(gpu_layer(32));
  const qkv_layer_spec* layers[] = {&spec.spec};
  qkv_warmup_options options = for_sm80();
  options.on_progress = stop;
  qkv_warmup_result* result = nullptr;
  EXPECT_EQ(qkv_warmup(layers, 1, nullptr, 0, &options, &result), QKV_UNAVAILABLE);
  EXPECT_EQ(result, nullptr);
  EXPECT_STREQ(qkv_last_error_value(), "result 5");
}

TEST(c_warmup_refuses, layers_that_cannot_run_are_skipped_and_calls_that_mean_nothing_fail) {
  LayerSpec refused = gpu_layer(36);
  const CSpec spec(refused);
  const qkv_layer_spec* layers[] = {&spec.spec, nullptr};
  qkv_warmup_options options = for_sm80();
  qkv_warmup_result* made = nullptr;
  expect_ok(qkv_warmup(layers, 1, nullptr, 0, &options, &made));
  const ResultHandle result(made);
  int64_t num_skipped = 0;
  const char* text = nullptr;
  expect_ok(qkv_warmup_result_num_skipped(result.get(), &num_skipped));
  ASSERT_EQ(num_skipped, 1);
  expect_ok(qkv_warmup_result_skipped(result.get(), 0, &text));
  EXPECT_THAT(text, ::testing::HasSubstr("head_dim: got 36"));
  EXPECT_EQ(qkv_warmup_result_skipped(result.get(), 1, &text), QKV_INVALID_ARGUMENT);
  qkv_warmed_kernel kernel;
  EXPECT_EQ(qkv_warmup_result_kernel(result.get(), 0, &kernel), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "index");
  EXPECT_EQ(qkv_warmup_result_kernel(nullptr, 0, &kernel), QKV_INVALID_ARGUMENT);

  EXPECT_EQ(qkv_warmup(layers, 2, nullptr, 0, &options, &made), QKV_INVALID_ARGUMENT) << "layers[1] is NULL";
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(qkv_warmup(nullptr, 1, nullptr, 0, &options, &made), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_warmup(layers, -1, nullptr, 0, &options, &made), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_warmup(layers, 1, nullptr, 0, nullptr, &made), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_warmup(layers, 1, nullptr, 0, &options, nullptr), QKV_INVALID_ARGUMENT);
  options.planners = 3;
  EXPECT_EQ(qkv_warmup(layers, 1, nullptr, 0, &options, &made), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "options.planners");
  options = for_sm80();
  options.arch = "sm_1";
  EXPECT_EQ(qkv_warmup(layers, 1, nullptr, 0, &options, &made), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "arch");
}

class c_kernel_cache : public testing::CacheFolderInUse {
 protected:
  void add(const std::string& key) const {
    constexpr int64_t kAmple = int64_t{1} << 30;
    const jit::CacheEntry entry = testing::wanted(key);
    jit::DiskCache(folder, kAmple).get(entry, [&] { return testing::code_of(entry); });
  }
};

KernelsHandle list() {
  qkv_cached_kernels* kernels = nullptr;
  expect_ok(qkv_cached_kernels_list(&kernels));
  return KernelsHandle(kernels);
}

int64_t count_of(const KernelsHandle& kernels) {
  int64_t count = -1;
  expect_ok(qkv_cached_kernels_count(kernels.get(), &count));
  return count;
}

TEST_F(c_kernel_cache, lists_what_its_cpp_namesake_lists) {
  add("a");
  add("b");
  testing::write_bytes(files()[0], "");
  int64_t max_bytes = 0;
  EXPECT_EQ(text_of([&](char* text, size_t capacity, size_t* needed) {
              return qkv_kernel_cache_place(text, capacity, needed, &max_bytes);
            }),
            folder);
  EXPECT_EQ(max_bytes, kernel_cache_place().max_bytes);
  const std::vector<CachedKernel> expected = cached_kernels();
  const KernelsHandle got = list();
  ASSERT_EQ(count_of(got), 2);
  for (int64_t i = 0; i < 2; ++i) {
    qkv_cached_kernel kernel;
    expect_ok(qkv_cached_kernels_get(got.get(), i, &kernel));
    EXPECT_EQ(kernel.path, expected[i].path);
    EXPECT_EQ(kernel.fault, expected[i].fault);
    EXPECT_EQ(kernel.name, expected[i].name);
    EXPECT_EQ(kernel.arch, expected[i].arch);
    EXPECT_EQ(kernel.num_bytes, expected[i].num_bytes);
    EXPECT_EQ(kernel.last_used, expected[i].last_used);
    EXPECT_EQ(kernel.registers, expected[i].registers);
  }
  qkv_cached_kernel kernel;
  EXPECT_EQ(qkv_cached_kernels_get(got.get(), 2, &kernel), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_cached_kernels_get(got.get(), -1, &kernel), QKV_INVALID_ARGUMENT);
}

TEST_F(c_kernel_cache, archive_serves_another_folder) {
  add("a");
  add("b");
  const std::string archive = root + "/kernels.qkv";
  int64_t number = -1;
  expect_ok(qkv_export_kernels(archive.c_str(), "sm_90a", &number));
  EXPECT_EQ(number, 0) << "none of that architecture";
  expect_ok(qkv_export_kernels(archive.c_str(), nullptr, &number));
  EXPECT_EQ(number, 2);
  expect_ok(qkv_clear_kernel_cache(&number));
  EXPECT_EQ(number, 2);
  EXPECT_EQ(count_of(list()), 0);
  use(root + "/other");
  expect_ok(qkv_import_kernels(archive.c_str(), &number));
  EXPECT_EQ(number, 2);
  EXPECT_EQ(count_of(list()), 2);

  testing::write_bytes(archive, "no archive");
  EXPECT_NE(qkv_import_kernels(archive.c_str(), &number), QKV_OK);
  EXPECT_EQ(count_of(list()), 2);
  EXPECT_EQ(qkv_import_kernels(nullptr, &number), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_export_kernels((archive + "/file").c_str(), "", &number), QKV_UNAVAILABLE);
  EXPECT_EQ(qkv_clear_kernel_cache(nullptr), QKV_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace qkv
