// One captured step serves every batch within its planner's limits: each replay has the bits of a step planned for its
// batch alone, and agrees with the definition.
#include "qkv/planner.hpp"

#include <cstring>
#include <functional>

#include "jit/driver.hpp"
#include "support/owned_stream.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::captured;
using testing::case_of;
using testing::expect_refused;
using testing::OwnedStream;

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_planner : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

// Device memory for the largest batch, in which each batch's bytes begin at the front.
class DeviceRows {
 public:
  DeviceRows(DType dtype, std::initializer_list<int64_t> shape)
      : layout_(Tensor::contiguous(nullptr, dtype, shape)), memory_(kGpu, num_bytes()) {}

  int64_t num_bytes() const { return layout_.num_elements() * size_bytes(layout_.dtype); }
  Tensor view(void* data) const {
    Tensor tensor = layout_;
    tensor.data = data;
    return tensor;
  }
  Tensor view() const {
    Tensor tensor = view(memory_.data());
    tensor.device = kGpu;
    return tensor;
  }
  // The tensor's bytes, and NaN behind them.
  void upload(const tools::OwnedTensor& tensor) {
    std::vector<std::byte> bytes(num_bytes(), std::byte{0xFF});
    const auto& buffer = tensor.buffer();
    const auto size = buffer.num_bytes();
    ASSERT_LE(size, num_bytes());
    std::memcpy(bytes.data(), buffer.data(), static_cast<size_t>(size));
    memory_.copy_from_host(bytes.data());
  }
  void fill_with_nan() {
    const std::vector<std::byte> bytes(num_bytes(), std::byte{0xFF});
    memory_.copy_from_host(bytes.data());
  }
  std::vector<std::byte> download() const {
    std::vector<std::byte> bytes(num_bytes());
    memory_.copy_to_host(bytes.data());
    return bytes;
  }

 private:
  Tensor layout_;
  DeviceMemory memory_;
};

class DeviceBatchArrays;

// A layer's step, captured at the first batch.
class CapturedStep {
 public:
  CapturedStep(const LayerSpec& layer, const PlanLimits& limits)
      : layer_(layer),
        attention_(layer, kGpu),
        planner_(attention_.planner(limits)),
        query_(layer.query_dtype, {limits.max_tokens, layer.num_q_heads, layer.head_dim}),
        key_(layer.query_dtype, {limits.max_tokens, layer.num_kv_heads, layer.head_dim}),
        value_(layer.query_dtype, {limits.max_tokens, layer.num_kv_heads, layer.value_dim()}),
        key_pages_(layer.kv_dtype, {limits.num_pages, layer.cache->page_size, layer.num_kv_heads, layer.head_dim}),
        value_pages_(layer.kv_dtype, {limits.num_pages, layer.cache->page_size, layer.num_kv_heads, layer.value_dim()}),
        out_(layer.out_dtype(), {limits.max_tokens, layer.num_q_heads, layer.value_dim()}),
        lse_(DType::f32, {layer.num_q_heads, limits.max_tokens}) {}
  ~CapturedStep() {
    if (graph_ != nullptr) jit::driver().graph_exec_destroy(graph_);
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  Planner& planner() { return planner_; }
  Stream stream() const { return stream_.stream(); }

  // Empty if the replay has the bits of an eager step and both agree with the definition.
  // With `arrays`, the batch is planned on the device, as part of what is captured.
  std::string failure_of(const tools::Case& c, DeviceBatchArrays* arrays = nullptr) {
    tools::CaseData data(c);
    upload(data);
    if (arrays != nullptr) {
      upload_arrays(*arrays, data.batch());
      if (graph_ == nullptr) graph_ = captured(stream_.handle, [&] { run(plan_on_device(*arrays)); });
    } else {
      const Plan plan = planner_.plan(data.batch(), stream());
      if (graph_ == nullptr) graph_ = captured(stream_.handle, [&] { run(plan); });
    }
    jit::check(jit::driver().graph_launch(graph_, stream_.handle), "cuGraphLaunch");
    jit::check(jit::driver().stream_synchronize(stream_.handle), "cuStreamSynchronize");
    std::vector<std::byte> out = out_.download();
    std::vector<std::byte> lse = lse_.download();
    const reference::Result expected =
        reference::attention(layer_, data.batch(), data.query.view(), with_new_tokens(data));
    std::string wrong = tools::difference(c, kGpu, out_.view(out.data()), lse_.view(lse.data()), expected);
    if (!wrong.empty()) return wrong;

    upload(data);
    run(attention_.plan(data.batch(), stream()));
    jit::check(jit::driver().stream_synchronize(stream_.handle), "cuStreamSynchronize");
    return out_.download() == out && lse_.download() == lse ? "" : "the captured step has other bits than an eager one";
  }

 private:
  static void upload_arrays(DeviceBatchArrays& arrays, const Batch& batch);
  Plan plan_on_device(const DeviceBatchArrays& arrays);

  void run(const Plan& plan) {
    const KvCache cache{key_pages_.view(), value_pages_.view()};
    attention_.update_cache(key_.view(), value_.view(), cache, plan, stream());
    attention_.forward(query_.view(), cache, plan, out_.view(), lse_.view(), stream());
  }

  void upload(const tools::CaseData& data) {
    query_.upload(data.query);
    key_.upload(data.key);
    value_.upload(data.value);
    key_pages_.upload(data.key_pages);
    value_pages_.upload(data.value_pages);
    out_.fill_with_nan();
    lse_.fill_with_nan();
  }

  // What update_cache leaves, on the host.
  KvCache with_new_tokens(tools::CaseData& data) const {
    cache_write(
        data.key.view(), data.value.view(), data.cache(),
        Tensor::contiguous(data.slot_mapping.data(), DType::i64, {static_cast<int64_t>(data.slot_mapping.size())}));
    return data.cache();
  }

  LayerSpec layer_;
  OwnedStream stream_;
  Attention attention_;
  Planner planner_;
  DeviceRows query_, key_, value_, key_pages_, value_pages_, out_, lse_;
  jit::CUgraphExec graph_ = nullptr;
};

struct Kind {
  const char* name;
  LayerSpec layer;
  PlanLimits limits;
};

Kind kind(const char* name, std::array<int32_t, 3> heads_and_dim, int32_t page_size, const Mask& mask,
          PlanLimits limits) {
  LayerSpec layer = testing::layer_of(heads_and_dim[0], heads_and_dim[1], heads_and_dim[2]);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.cache = CacheSpec{page_size};
  layer.mask = mask;
  return {name, layer, limits};
}

std::vector<Kind> kinds() {
  const PlanLimits mixed = {
      .max_requests = 16, .max_tokens = 60, .max_seq_len = 900, .max_keys = 2500, .num_pages = 400};
  std::vector<Kind> all = {
      kind("long", {4, 1, 64}, 16, mask::causal(),
           {.max_requests = 8, .max_tokens = 20, .max_seq_len = 6000, .max_keys = 7000, .num_pages = 600}),
      kind("window", {8, 2, 128}, 16, mask::sliding_window(70), mixed),
      kind("flags", {8, 2, 64}, 16, mask::per_request_causal() & mask::window(200, 30), mixed),
      kind("general", {6, 2, 72}, 19, mask::prefix_lm(), mixed),
      kind("decode", {16, 2, 128}, 16, mask::causal(),
           {.max_requests = 24,
            .max_tokens = 24,
            .max_query_len = 1,
            .max_seq_len = 900,
            .max_keys = 4000,
            .num_pages = 600}),
      kind("documents", {4, 1, 192}, 64, mask::document() & mask::rswa(100), mixed),
  };
  all[1].layer.softcap = 30;
  all[1].layer.sinks = {0, 1, 2, -1, 0.5F, 3, -2, 1};
  all[2].layer.alibi_per_request = true;
  all[3].layer.output_dtype = DType::f32;
  all[5].layer.head_dim_v = 128;
  all[5].layer.query_dtype = all[5].layer.kv_dtype = DType::f16;
  return all;
}

// Requests until one of the limits is reached or enough are drawn: some empty, as the padding of a captured batch is.
tools::Case draw_batch(const Kind& kind, int64_t index) {
  tools::Draw draw(11, index);
  tools::Case c;
  c.seed = 11;
  c.index = index;
  c.layer = kind.layer;
  const PlanLimits& limits = kind.limits;
  const int64_t wanted = draw.range(0, limits.max_requests);
  const int64_t most_new = limits.max_query_len == 1 ? 1 : draw.one_in(2) ? 4 : limits.max_tokens;
  int64_t tokens = 0;
  int64_t keys = 0;
  while (static_cast<int64_t>(c.requests.size()) < wanted) {
    const bool padding = draw.one_in(8);
    const int64_t q_len = padding ? 0 : draw.one_in(2) ? 1 : draw.range(0, most_new);
    const int64_t kv_len = padding ? 0 : draw.range(0, draw.one_in(3) ? limits.max_seq_len : 300);
    tokens += q_len;
    keys += kv_len;
    if (tokens > limits.max_tokens || keys > limits.max_keys) break;
    c.requests.push_back({static_cast<int32_t>(q_len), static_cast<int32_t>(kv_len)});
  }
  return c;
}

TEST_F(gpu_planner, casebook_083_one_captured_step_serves_every_batch) {
  for (const Kind& kind : kinds()) {
    CapturedStep step(kind.layer, kind.limits);
    tools::Case dummy;
    dummy.layer = kind.layer;
    dummy.requests.assign(4, {1, 1});
    ASSERT_EQ(step.failure_of(dummy), "") << kind.name;
    for (int64_t i = 0; i < 55; ++i) {
      const tools::Case c = draw_batch(kind, i);
      ASSERT_EQ(step.failure_of(c), "") << kind.name << ", batch " << i << ": " << tools::describe(c);
    }
  }
}

// Batches that share prefixes and others, in turn: the launches for rows of several requests are captured, too.
TEST_F(gpu_planner, one_captured_step_serves_batches_that_share_prefixes) {
  const PlanLimits limits = {
      .max_requests = 12, .max_tokens = 24, .max_query_len = 2, .max_seq_len = 5000, .num_pages = 4000};
  for (const Kind& k : {kind("sm90", {4, 1, 128}, 16, mask::causal(), limits),
                        kind("sm80", {4, 1, 72}, 16, mask::sliding_window(2000), limits)}) {
    CapturedStep step(k.layer, k.limits);
    for (int32_t i = 0; i < 14; ++i) {
      tools::Draw draw(12, i);
      tools::Case c;
      c.seed = 12;
      c.index = i;
      c.layer = k.layer;
      PrefixGroup all{{}, static_cast<int32_t>(16 * (draw.one_in(4) ? 0 : draw.range(40, 110)))};
      const int64_t num_requests = draw.range(1, limits.max_requests);
      for (int32_t r = 0; r < num_requests; ++r) {
        const auto q_len = static_cast<int32_t>(draw.range(1, 2));
        c.requests.push_back({q_len, all.num_tokens + q_len + static_cast<int32_t>(draw.range(0, 700))});
        all.requests.push_back(r);
      }
      if (all.num_tokens > 0 && num_requests > 1) c.prefix_groups = {all};
      c.prefix_sharing = draw.one_in(3) ? PrefixSharing::automatic : PrefixSharing::always;
      ASSERT_EQ(step.failure_of(c), "") << k.name << ", batch " << i << ": " << tools::describe(c);
    }
  }
}

// A batch's index arrays on the device, each in memory for the largest batch.
class DeviceBatchArrays {
 public:
  DeviceBatchArrays(const LayerSpec& layer, const PlanLimits& limits)
      : layer_(layer),
        width_((limits.max_seq_len + layer.cache->page_size - 1) / layer.cache->page_size),
        starts_(kGpu, 4 * (limits.max_requests + 1)),
        lengths_(kGpu, 4 * limits.max_requests),
        table_(kGpu, 4 * limits.max_requests * width_),
        slots_(kGpu, 8 * limits.max_tokens),
        flags_(kGpu, 4 * limits.max_requests) {}

  // Padded up to the limits as a captured batch is: no tokens, no keys, no slots.
  void upload(const Batch& batch) {
    copy<int32_t>(batch.query_start_loc, starts_,
                  static_cast<const int32_t*>(batch.query_start_loc.data)[requests(batch)]);
    copy<int32_t>(batch.seq_lens, lengths_, 0);
    copy<int64_t>(batch.slot_mapping, slots_, -1);
    if (!batch.mask_operands.empty()) copy<int32_t>(batch.mask_operands[0].values, flags_, 0);
    std::vector<int32_t> table(table_.num_bytes() / 4, -1);
    for (int64_t r = 0; r < requests(batch); ++r) {
      std::memcpy(&table[r * width_],
                  static_cast<const int32_t*>(batch.block_table.data) + r * batch.block_table.stride[0],
                  4 * std::min<int64_t>(width_, batch.block_table.shape[1]));
    }
    table_.copy_from_host(table.data());
  }

  Batch batch() const {
    const int64_t num_requests = lengths_.num_bytes() / 4;
    Batch batch;
    batch.query_start_loc = view(starts_, DType::i32, {num_requests + 1});
    batch.seq_lens = view(lengths_, DType::i32, {num_requests});
    batch.block_table = view(table_, DType::i32, {num_requests, width_});
    batch.slot_mapping = view(slots_, DType::i64, {slots_.num_bytes() / 8});
    for (const OperandDeclaration& operand : operands_of(layer_.effective_mask())) {
      batch.mask_operands.push_back({operand.name, view(flags_, DType::i32, {num_requests})});
    }
    return batch;
  }

 private:
  static int64_t requests(const Batch& batch) { return batch.seq_lens.shape[0]; }
  static Tensor view(const DeviceMemory& memory, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor tensor = Tensor::contiguous(memory.data(), dtype, shape);
    tensor.device = kGpu;
    return tensor;
  }
  template <class Int>
  static void copy(const Tensor& from, const DeviceMemory& to, Int padding) {
    std::vector<Int> values(to.num_bytes() / sizeof(Int), padding);
    std::memcpy(values.data(), from.data, from.shape[0] * sizeof(Int));
    to.copy_from_host(values.data());
  }

  const LayerSpec& layer_;
  int64_t width_;
  DeviceMemory starts_, lengths_, table_, slots_, flags_;
};

void CapturedStep::upload_arrays(DeviceBatchArrays& arrays, const Batch& batch) { arrays.upload(batch); }
Plan CapturedStep::plan_on_device(const DeviceBatchArrays& arrays) { return planner_.plan(arrays.batch(), stream()); }

TEST_F(gpu_planner, casebook_086_a_captured_step_plans_itself_from_what_the_device_holds) {
  for (Kind& kind : kinds()) {
    if (std::string(kind.name) != "long" && std::string(kind.name) != "window" && std::string(kind.name) != "decode" &&
        std::string(kind.name) != "flags") {
      continue;
    }
    kind.layer.alibi_per_request = false;
    kind.limits.plans_on_device = true;
    CapturedStep step(kind.layer, kind.limits);
    DeviceBatchArrays arrays(kind.layer, kind.limits);
    for (int64_t i = 0; i < 55; ++i) {
      const tools::Case c = draw_batch(kind, 1000 + i);
      ASSERT_EQ(step.failure_of(c, &arrays), "") << kind.name << ", batch " << i << ": " << tools::describe(c);
    }
  }
}

TEST_F(gpu_planner, a_batch_on_the_device_over_the_limits_runs_nothing_and_is_told) {
  Kind k = kinds().front();
  k.limits.plans_on_device = true;
  CapturedStep step(k.layer, k.limits);
  DeviceBatchArrays arrays(k.layer, k.limits);
  tools::Case c = draw_batch(k, 3);
  ASSERT_EQ(step.failure_of(c, &arrays), "");
  const std::vector<int32_t> starts = {0, 1}, lengths = {k.limits.max_seq_len + 1}, table(1, 0);
  const std::vector<int64_t> slots = {-1};
  arrays.upload({testing::view(starts), testing::view(lengths), Tensor::contiguous(table.data(), DType::i32, {1, 1}),
                 testing::view(slots)});
  step.planner().plan(arrays.batch(), step.stream());
  expect_refused([&] { step.planner().check(step.stream()); }, ErrorCode::invalid_argument, "batch");
}

TEST_F(gpu_planner, casebook_089_windows_without_causality_replay_as_lengths_grow) {
  const Kind k =
      kind("draft", {4, 2, 64}, 16, mask::everything(),
           {.max_requests = 4, .max_tokens = 32, .max_query_len = 8, .max_seq_len = 4096, .num_pages = 1100});
  CapturedStep step(k.layer, k.limits);
  for (const int32_t kv_len : {8, 9, 127, 128, 129, 700, 2048, 4096}) {
    tools::Case c;
    c.layer = k.layer;
    c.requests = {{8, kv_len}, {8, kv_len}, {8, 8}, {8, kv_len}};
    ASSERT_EQ(step.failure_of(c), "") << kv_len;
  }
}

TEST_F(gpu_planner, planning_on_a_captured_stream_is_refused) {
  const Kind k = kinds().front();
  CapturedStep step(k.layer, k.limits);
  tools::Case c = draw_batch(k, 3);
  const tools::CaseData data(c);
  jit::CUgraph graph = nullptr;
  const auto stream = static_cast<jit::CUstream>(step.stream().handle);
  jit::check(jit::driver().stream_begin_capture(stream, jit::CUstreamCaptureMode::relaxed), "cuStreamBeginCapture");
  expect_refused([&] { step.planner().plan(data.batch(), step.stream()); }, ErrorCode::invalid_argument, "stream");
  jit::check(jit::driver().stream_end_capture(stream, &graph), "cuStreamEndCapture");
  jit::driver().graph_destroy(graph);
}

TEST_F(gpu_planner, planners_may_share_a_workspace_of_the_size_asked_for) {
  const Kind k = kinds().front();
  const Attention attention(k.layer, kGpu);
  const int64_t bytes = attention.workspace_bytes(k.limits);
  ASSERT_GT(bytes, 0);
  const DeviceMemory memory(kGpu, bytes);
  Tensor workspace = Tensor::contiguous(memory.data(), DType::i32, {bytes / 4});
  workspace.device = kGpu;
  const Planner first = attention.planner(k.limits, workspace);
  const Planner second = attention.planner(k.limits, workspace);
  workspace.shape[0] -= 1;
  expect_refused([&] { attention.planner(k.limits, workspace); }, ErrorCode::invalid_argument, "workspace");
}

}  // namespace
}  // namespace qkv
