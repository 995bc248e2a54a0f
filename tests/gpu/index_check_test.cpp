// QKV_CHECK=1 on a GPU: a plan whose memory was overwritten is refused before a kernel follows its indices.
#include <cstdlib>
#include <functional>

#include "cuda/memory.hpp"
#include "cuda/placed_plan.hpp"
#include "jit/driver.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_refused;

constexpr Device kGpu{DeviceKind::cuda, 0};

template <class Value>
void overwrite(const Value* address, Value value) {
  const auto target = reinterpret_cast<jit::CUdeviceptr>(address);
  jit::check(jit::driver().memcpy_htod_async(target, &value, sizeof(value), nullptr), "cuMemcpyHtoDAsync");
  jit::check(jit::driver().stream_synchronize(nullptr), "cuStreamSynchronize");
}

// Two requests, with 3 and 1 new tokens, and all that their calls need.
class index_check : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
    setenv("QKV_CHECK", "1", 1);
    attention.emplace(c.layer, kGpu);
    plan.emplace(attention->plan(data.batch()));
    current.emplace(0);
    placed().fill(params);
  }
  ~index_check() override { unsetenv("QKV_CHECK"); }

  static tools::Case two_requests() {
    auto made = case_of(4, 2, 64, {3, 1}, {20, 33});
    made.layer.query_dtype = made.layer.kv_dtype = DType::bf16;
    return made;
  }
  const cuda::DevicePlan& placed() const { return static_cast<const cuda::DevicePlan&>(*plan->data().placed); }

  void forward(Stream stream = {}) {
    const tools::Placed query(data.query, kGpu), keys(data.key_pages, kGpu), values(data.value_pages, kGpu);
    tools::OwnedTensor out_memory(DType::bf16, {4, 4, 64});
    const tools::Placed out(out_memory, kGpu);
    const KvCache cache{keys.on_device(data.key_cache), values.on_device(data.value_cache)};
    attention->forward(query.view(), cache, *plan, out.view(), {}, stream);
  }
  void update_cache() {
    const tools::Placed key(data.key, kGpu), value(data.value, kGpu);
    const tools::Placed keys(data.key_pages, kGpu), values(data.value_pages, kGpu);
    const KvCache cache{keys.on_device(data.key_cache), values.on_device(data.value_cache)};
    attention->update_cache(key.view(), value.view(), cache, *plan);
  }

  tools::Case c = two_requests();
  tools::CaseData data{c};
  std::optional<Attention> attention;
  std::optional<Plan> plan;
  std::optional<cuda::CurrentDevice> current;
  cuda::ForwardParams params{};
};

TEST_F(index_check, whole_plans_pass) {
  update_cache();
  forward();
}

TEST_F(index_check, page_outside_the_cache) {
  overwrite(params.pages + 3, 1 << 30);
  expect_refused([&] { forward(); }, ErrorCode::invalid_argument, "block_table[1, 1]");
  overwrite(params.pages + 1, -1);  // the first is told
  expect_refused([&] { forward(); }, ErrorCode::invalid_argument, "block_table[0, 1]");
}

TEST_F(index_check, length_beyond_the_pages) {
  overwrite(params.seq_lens + 1, 100'000);
  expect_refused([&] { forward(); }, ErrorCode::invalid_argument, "seq_lens[1]");
}

TEST_F(index_check, slot_outside_the_cache) {
  overwrite(placed().slots + 2, int64_t{1} << 40);
  expect_refused([&] { update_cache(); }, ErrorCode::invalid_argument, "slot_mapping[2]");
  forward();  // reads no slots
}

TEST_F(index_check, captures_are_refused) {
  jit::CUstream stream = nullptr;
  jit::check(jit::driver().stream_create(&stream, 1), "cuStreamCreate");
  jit::check(jit::driver().stream_begin_capture(stream, jit::CUstreamCaptureMode::relaxed), "cuStreamBeginCapture");
  expect_refused([&] { forward(Stream{stream}); }, ErrorCode::unsupported, "QKV_CHECK");
  jit::CUgraph graph = nullptr;
  jit::check(jit::driver().stream_end_capture(stream, &graph), "cuStreamEndCapture");
  jit::driver().graph_destroy(graph);
  jit::driver().stream_destroy(stream);
}

TEST_F(index_check, lack_of_device_memory_is_told) {
  expect_refused([] { DeviceMemory(kGpu, int64_t{1} << 42); }, ErrorCode::unavailable, "cuMemAlloc");
}

}  // namespace
}  // namespace qkv
