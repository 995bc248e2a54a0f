// What only a GPU can show. Skipped where there is none; `make test-gpu` runs it and keeps tests/gpu/verified.json.
#include <array>
#include <cmath>
#include <functional>
#include <memory>

#include "jit/driver.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_refused;
using testing::view;

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

tools::Case bf16(tools::Case c) {
  c.layer.query_dtype = c.layer.kv_dtype = DType::bf16;
  return c;
}

void expect_agrees_on_gpu(const tools::Case& c) { EXPECT_EQ(tools::failure_of(c, kGpu), "") << tools::describe(c); }

TEST_F(gpu, casebook_masks_and_windows) {
  for (const Mask& mask :
       {mask::sliding_window(4), mask::window(32, 64), mask::prefix_lm(7), mask::prefix_lm(), mask::rswa(4),
        mask::per_request_causal(), mask::per_request_causal() & mask::window(3, 3), mask::window(0, 0),
        mask::document() & mask::causal(), mask::tree(), mask::everything(), mask::nothing()}) {
    auto c = bf16(case_of(4, 2, 64, {129, 1, 8, 0, 33}, {64, 21, 5, 7, 300}));
    c.layer.mask = mask;
    expect_agrees_on_gpu(c);
  }
}

TEST_F(gpu, casebook_pages_strides_and_head_sizes) {
  for (const int32_t page_size : {1, 3, 16, 19, 64, 544}) {
    auto c = bf16(case_of(8, 1, 64, {1, 15, 2, 1, 1}, {1, 15, 16, 17, 300}));
    c.layer.cache = CacheSpec{page_size};
    c.layout.odd_singleton_strides = true;
    c.layout.interleaved = page_size % 2 == 0;
    expect_agrees_on_gpu(c);
  }
  for (const int32_t head_dim : {16, 40, 72, 80, 96, 112, 192, 256, 512}) {
    expect_agrees_on_gpu(bf16(case_of(7, 1, head_dim, {1, 20, 70}, {50, 60, 70})));
  }
}

TEST_F(gpu, casebook_empty_rows_sinks_and_splits) {
  expect_agrees_on_gpu(bf16(case_of(4, 2, 32, {}, {})));
  expect_agrees_on_gpu(bf16(case_of(9, 3, 64, {1, 0, 1}, {3, 0, 5})));
  for (const int32_t kv_len : {0, 1000, 9000}) {
    auto c = bf16(case_of(4, 1, 64, {1, 3, 40}, {kv_len, kv_len, kv_len}));
    c.layer.sinks = {0.0F, 1.5F, -2.0F, 4.0F};
    c.layer.softcap = 20;
    expect_agrees_on_gpu(c);
    c.layer.mask = mask::sliding_window(64);
    expect_agrees_on_gpu(c);
  }
}

// Few rows: every tile of 4 to 32 rows, splits that join in clusters and by tickets, launches of few and of many items.
// Each request also runs alone, where another of these kernels takes it, and must have the same bits.
TEST_F(gpu, few_rows_of_every_tile_and_join) {
  const std::vector<int32_t> one_token(100, 1);
  std::vector<int32_t> mostly_short(100, 600);
  mostly_short[50] = 17'000;
  for (const auto& [num_q_heads, num_kv_heads, head_dim] : {std::array{8, 2, 128}, std::array{16, 2, 64}}) {
    const auto decode = [&](const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens) {
      return bf16(case_of(num_q_heads, num_kv_heads, head_dim, q_lens, kv_lens));
    };
    expect_agrees_on_gpu(decode({1, 2, 3, 4, 1}, {3000, 900, 700, 40, 18'000}));
    expect_agrees_on_gpu(decode({1, 1, 1}, {3000, 18'000, 18'000}));
    expect_agrees_on_gpu(decode(one_token, mostly_short));
  }
}

// Many rows: the head sizes that Hopper has a kernel for, dense, by pages that hold no whole step, and of one that
// holds several; items whose first one is short; warpgroups that see all of a step beside others that do not.
TEST_F(gpu, many_rows_of_every_tuned_head_size) {
  for (const auto& [head_dim, head_dim_v, page_size] :
       {std::array{64, 64, 48}, {96, 96, 16}, {96, 96, 0}, {128, 128, 256}, {192, 128, 0}, {256, 256, 16}}) {
    auto c = bf16(case_of(page_size == 48 ? 6 : 8, 2, head_dim, {500, 333, 60}, {500, 700, 60}, page_size > 0));
    c.layer.head_dim_v = head_dim_v;
    if (page_size > 0) c.layer.cache = CacheSpec{page_size};
    if (page_size == 16) c.layer.mask = mask::window(150, 20);
    expect_agrees_on_gpu(c);
  }
}

TEST_F(gpu, casebook_055_no_keys_at_all) {
  for (const int32_t q_len : {1, 35}) {
    for (const bool cache : {true, false}) {
      for (const int32_t head_dim : {32, 128}) {
        const std::vector<int32_t> q_lens(8, q_len);
        expect_agrees_on_gpu(bf16(case_of(4, 2, head_dim, q_lens, std::vector<int32_t>(8, 0), cache)));
      }
    }
  }
}

// A stream of the test's own, and the graph of what was captured on it.
class GraphStream {
 public:
  GraphStream() {
    jit::CUcontext context = nullptr;
    jit::check(driver_.device_primary_ctx_retain(&context, 0), "cuDevicePrimaryCtxRetain");
    jit::check(driver_.ctx_set_current(context), "cuCtxSetCurrent");
    jit::check(driver_.stream_create(&stream_, jit::kStreamNonBlocking), "cuStreamCreate");
  }
  GraphStream(const GraphStream&) = delete;
  GraphStream& operator=(const GraphStream&) = delete;
  ~GraphStream() {
    if (executable_ != nullptr) driver_.graph_exec_destroy(executable_);
    if (graph_ != nullptr) driver_.graph_destroy(graph_);
    driver_.stream_destroy(stream_);
  }

  Stream stream() const { return {stream_}; }
  void capture(const std::function<void()>& step) {
    jit::check(driver_.stream_begin_capture(stream_, jit::CUstreamCaptureMode::relaxed), "cuStreamBeginCapture");
    step();
    jit::check(driver_.stream_end_capture(stream_, &graph_), "cuStreamEndCapture");
    jit::check(driver_.graph_instantiate(&executable_, graph_, 0), "cuGraphInstantiate");
  }
  void replay() {
    jit::check(driver_.graph_launch(executable_, stream_), "cuGraphLaunch");
    jit::check(driver_.stream_synchronize(stream_), "cuStreamSynchronize");
  }

 private:
  const jit::Driver& driver_ = jit::driver();
  jit::CUstream stream_ = nullptr;
  jit::CUgraph graph_ = nullptr;
  jit::CUgraphExec executable_ = nullptr;
};

// A step captured once and replayed gives the bits of the eager step.
TEST_F(gpu, a_captured_step_replays_with_the_same_bits) {
  auto c = bf16(case_of(8, 2, 128, {1, 40, 1}, {5000, 900, 33}));
  tools::CaseData data(c);
  const Attention attention(c.layer, kGpu);
  const tools::Placed query(data.query, kGpu), key(data.key, kGpu), value(data.value, kGpu),
      key_pages(data.key_pages, kGpu), value_pages(data.value_pages, kGpu);
  tools::OwnedTensor eager_out(DType::bf16, {42, 8, 128});
  tools::OwnedTensor replayed_out(DType::bf16, {42, 8, 128});
  const tools::Placed eager(eager_out, kGpu), replayed(replayed_out, kGpu);
  const KvCache cache{key_pages.on_device(data.key_cache), value_pages.on_device(data.value_cache)};

  GraphStream graph;
  const Plan plan = attention.plan(data.batch(), graph.stream());
  const auto step = [&](const tools::Placed& out) {
    attention.update_cache(key.view(), value.view(), cache, plan, graph.stream());
    attention.forward(query.view(), cache, plan, out.view(), {}, graph.stream());
  };
  step(eager);
  graph.capture([&] { step(replayed); });
  for (int32_t i = 0; i < 3; ++i) graph.replay();
  eager.fetch();
  replayed.fetch();
  EXPECT_EQ(eager_out.buffer().bytes(), replayed_out.buffer().bytes());
}

tools::Case fp8(KvScales scales, DType dtype, std::vector<int32_t> q, std::vector<int32_t> kv) {
  auto c = bf16(case_of(8, 2, 128, std::move(q), std::move(kv)));
  c.layer.kv_dtype = dtype;
  c.layer.kv_scales = scales;
  return c;
}

constexpr KvScales kGranularities[] = {KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head,
                                       KvScales::per_token_head};

TEST_F(gpu, casebook_059_and_061_scales_of_every_granularity) {
  for (const KvScales granularity : kGranularities) {
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
      auto c = fp8(granularity, dtype, {1, 3, 40, 150, 1}, {5000, 33, 200, 150, 0});
      expect_agrees_on_gpu(c);
      c.layer.query_dtype = DType::f16;
      c.layer.output_dtype = tools::is_float8(dtype) ? dtype : DType::f8e4m3;
      c.layout.interleaved = true;
      c.layer.cache->page_size = 1;
      c.layer.mask = mask::window(70, 0);
      c.layer.softcap = 20;
      c.layer.sinks.assign(8, 0.5F);
      expect_agrees_on_gpu(c);
    }
  }
  for (const int32_t head_dim : {16, 80, 192, 256, 512}) {
    auto c = fp8(KvScales::per_token_head, DType::f8e4m3, {1, 20, 70}, {50, 60, 70});
    c.layer.head_dim = head_dim;
    c.layer.mask = mask::prefix_lm(7);
    expect_agrees_on_gpu(c);
  }
}

// Few rows: every tile of 4 to 32 rows, head sizes whose rows are whole loads and such that end in half a load, boxes
// and gathers, splits that join in clusters and by tickets. Each request also runs alone, with the same bits.
// A test of its own for each head size and page: every layer is kernels to compile.
class gpu_few_rows_of_8_bit_caches : public gpu, public ::testing::WithParamInterface<std::array<int32_t, 3>> {};
INSTANTIATE_TEST_SUITE_P(dims_and_page, gpu_few_rows_of_8_bit_caches,
                         ::testing::Values(std::array{128, 128, 16}, std::array{128, 128, 64}, std::array{128, 128, 3},
                                           std::array{64, 64, 16}, std::array{80, 48, 16}, std::array{192, 128, 1},
                                           std::array{256, 256, 16}));

TEST_P(gpu_few_rows_of_8_bit_caches, agree_with_the_definition) {
  const auto& [head_dim, head_dim_v, page_size] = GetParam();
  for (const KvScales granularity : {KvScales::per_request_head, KvScales::per_token_head}) {
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
      auto c = fp8(granularity, dtype, {1, 2, 3, 4, 1, 1}, {3000, 900, 700, 40, 18'000, 40'000});
      c.layer.head_dim = head_dim;
      c.layer.head_dim_v = head_dim_v;
      c.layer.cache->page_size = page_size;
      expect_agrees_on_gpu(c);
    }
  }
}

// bf16 reaches further than the f16 in which 8-bit keys are multiplied.
TEST_F(gpu, queries_beyond_f16_meet_8_bit_keys) {
  for (const float magnitude : {1e-30F, 1e-8F, 1e6F, 1e30F}) {
    for (const int32_t q_len : {1, 8}) {
      auto c = fp8(KvScales::per_head, DType::f8e4m3, {q_len}, {700});
      c.magnitude = magnitude;
      c.layer.scale = 0.1F / magnitude;
      expect_agrees_on_gpu(c);
    }
  }
}

TEST_F(gpu, casebook_064_scales_may_change_between_replays) {
  auto c = fp8(KvScales::per_head, DType::f8e4m3, {1, 40, 20}, {1, 40, 20});  // all keys are new
  tools::CaseData data(c);
  const Attention attention(c.layer, kGpu);
  const tools::Placed query(data.query, kGpu), key(data.key, kGpu), value(data.value, kGpu),
      key_pages(data.key_pages, kGpu), value_pages(data.value_pages, kGpu);
  tools::OwnedTensor out(DType::bf16, {61, 8, 128});
  const tools::Placed placed_out(out, kGpu);
  DeviceMemory device_scales(kGpu, 4 * sizeof(float));
  const Tensor scales = Tensor::contiguous(device_scales.data(), DType::f32, {4}, kGpu);
  const KvCache cache{key_pages.on_device(data.key_cache), value_pages.on_device(data.value_cache),
                      scales.slice(0, 0, 2), scales.slice(0, 2, 4)};
  GraphStream graph;
  const Plan plan = attention.plan(data.batch(), graph.stream());
  graph.capture([&] {
    attention.update_cache(key.view(), value.view(), cache, plan, graph.stream());
    attention.forward(query.view(), cache, plan, placed_out.view(), {}, graph.stream());
  });
  for (const std::vector<float>& values : {std::vector<float>{1, 1, 1, 1}, {0.1F, 0.02F, 0.03F, 0.2F}}) {
    device_scales.copy_from_host(values.data());
    graph.replay();
    placed_out.fetch();
    key_pages.fetch();
    value_pages.fetch();
    const Tensor on_host = view(values, {4});
    const KvCache written{data.key_cache, data.value_cache, on_host.slice(0, 0, 2), on_host.slice(0, 2, 4)};
    const auto expected = reference::attention(c.layer, data.batch(), data.query.view(), written);
    for (int64_t i = 0; i < 61 * 8; ++i) {
      const double want = expected.out[i * 128];
      ASSERT_NEAR(tools::load(out.view(), {i / 8, i % 8, 0}), want, 2e-2 * (1 + std::fabs(want))) << values[0];
    }
  }
}

// Infinities, NaN, zeros and the smallest numbers become the bytes and the scales that the CPU writes. Rows are held
// whole by a few lanes or by a warp, or are taken by elements: 68 is no whole number of vectors, 800 too long. One
// head's scale is so small that its reciprocal will not do.
TEST_F(gpu, quantised_bytes_are_those_of_the_cpu) {
  constexpr int64_t kTokens = 7;
  const std::vector<int64_t> slots = {5, -1, 0, 2, 7, 3, 1};
  const auto expect_same = [&](DType dtype, KvScales granularity, DType source, int64_t heads, int64_t dim) {
    tools::OwnedTensor rows(source, {kTokens, heads, dim});
    tools::Draw draw(5, 0);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          const float size = std::ldexp(1.0F, static_cast<int32_t>(draw.range(-20, 12)));
          tools::store(rows.view(), {t, h, d}, t == 6 ? 0.0F : draw.normal() * size);
        }
      }
    }
    int64_t at = 0;
    for (const float special : {INFINITY, -INFINITY, NAN, -0.0F}) {
      tools::store(rows.view(), {2, heads - 1, at++}, special);
    }
    tools::OwnedTensor pages[2], scales[2];
    for (auto& of_device : pages) of_device = tools::OwnedTensor(dtype, {2, 4, heads, dim});
    for (auto& of_device : scales) {
      of_device = granularity == KvScales::per_head ? tools::OwnedTensor(DType::f32, {heads})
                                                    : tools::OwnedTensor(DType::f32, {2, 4, heads});
      for (int64_t h = 0; h < heads && granularity == KvScales::per_head; ++h) {
        tools::store(of_device.view(), {h}, h == 2 ? 0x1p-70F : h % 2 == 0 ? 0.37F : 0.011F);
      }
    }
    cache_write(rows.view(), rows.view(), {pages[0].view(), pages[0].view(), scales[0].view(), scales[0].view()},
                view(slots));
    const tools::Placed source_on_gpu(rows, kGpu), pages_on_gpu(pages[1], kGpu), scales_on_gpu(scales[1], kGpu);
    cache_write(source_on_gpu.view(), source_on_gpu.view(),
                {pages_on_gpu.view(), pages_on_gpu.view(), scales_on_gpu.view(), scales_on_gpu.view()}, view(slots));
    pages_on_gpu.fetch();
    scales_on_gpu.fetch();
    EXPECT_TRUE(pages[0].buffer() == pages[1].buffer())
        << to_string(dtype) << " from " << to_string(source) << ", dim " << dim;
    EXPECT_TRUE(scales[0].buffer() == scales[1].buffer())
        << to_string(dtype) << " from " << to_string(source) << ", dim " << dim;
  };
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
    for (const KvScales granularity : {KvScales::per_head, KvScales::per_token_head}) {
      for (const DType source : {DType::f32, DType::f16, DType::bf16}) {
        for (const int64_t dim : {16, 48, 80, 128, 192, 576, 800}) expect_same(dtype, granularity, source, 3, dim);
        expect_same(dtype, granularity, source, 40, 128);  // more rows of a token than teams
      }
    }
  }
}

// A single call's plan ends before its work has run: the plan of the next call must not take its memory from it.
TEST_F(gpu, calls_in_a_row_have_the_bits_of_calls_apart) {
  auto c = bf16(case_of(8, 2, 128, {1, 40, 1, 1}, {5000, 900, 33, 9000}, false));
  tools::CaseData data(c);
  const tools::Placed query(data.query, kGpu), key(data.key, kGpu), value(data.value, kGpu);
  // The first requests of the batch.
  const auto call = [&](int64_t num_requests, const tools::Placed& out) {
    const Batch batch = data.batch();
    int64_t num_keys = 0;
    for (int64_t r = 0; r < num_requests; ++r) num_keys += data.seq_lens[r];
    VarlenArguments arguments;
    arguments.query = query.view();
    arguments.key = key.view().slice(0, 0, num_keys);
    arguments.value = value.view().slice(0, 0, num_keys);
    arguments.query_start_loc = batch.query_start_loc.slice(0, 0, num_requests + 1);
    arguments.seq_lens = batch.seq_lens.slice(0, 0, num_requests);
    arguments.mask = mask::causal();
    arguments.out = out.view();
    varlen_attention(arguments);
  };
  constexpr int kCalls = 12;
  const auto requests_of = [](int i) { return i % 4 + 1; };
  std::vector<tools::OwnedTensor> apart, in_a_row;
  for (int i = 0; i < kCalls; ++i) {
    for (auto* outs : {&apart, &in_a_row}) outs->emplace_back(DType::bf16, std::initializer_list<int64_t>{43, 8, 128});
  }
  for (int i = 0; i < kCalls; ++i) {
    const tools::Placed out(apart[i], kGpu);
    call(requests_of(i), out);
    out.fetch();  // waits
  }
  std::vector<std::unique_ptr<tools::Placed>> outs;
  for (tools::OwnedTensor& out : in_a_row) outs.push_back(std::make_unique<tools::Placed>(out, kGpu));
  for (int i = 0; i < kCalls; ++i) call(requests_of(i), *outs[i]);
  for (int i = 0; i < kCalls; ++i) {
    outs[i]->fetch();
    EXPECT_EQ(apart[i].buffer().bytes(), in_a_row[i].buffer().bytes()) << i;
  }
}

void expect_merged_as_on_the_cpu(int32_t num_states, int64_t dim, DType dtype) {
  SCOPED_TRACE(std::to_string(num_states) + " states of " + std::to_string(dim) + " columns, " +
               std::string(to_string(dtype)));
  constexpr int64_t kTokens = 5, kHeads = 3;
  tools::Draw draw(3, num_states);
  std::vector<tools::OwnedTensor> outs, lses;
  for (int32_t s = 0; s < num_states; ++s) {
    outs.emplace_back(dtype, std::initializer_list<int64_t>{kTokens, kHeads, dim});
    lses.emplace_back(DType::f32, std::initializer_list<int64_t>{kHeads, kTokens});
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        const bool empty = draw.one_in(3);
        tools::store(lses[s].view(), {h, t}, empty ? -INFINITY : draw.normal());
        for (int64_t d = 0; d < dim; ++d) tools::store(outs[s].view(), {t, h, d}, empty ? NAN : draw.normal());
      }
    }
  }
  tools::OwnedTensor cpu_out(dtype, {kTokens, kHeads, dim}), cpu_lse(DType::f32, {kHeads, kTokens});
  tools::OwnedTensor gpu_out(dtype, {kTokens, kHeads, dim}), gpu_lse(DType::f32, {kHeads, kTokens});
  std::vector<State> cpu_states, gpu_states;
  std::vector<std::unique_ptr<tools::Placed>> placed;
  for (int32_t s = 0; s < num_states; ++s) {
    cpu_states.push_back({outs[s].view(), lses[s].view()});
    placed.push_back(std::make_unique<tools::Placed>(outs[s], kGpu));
    placed.push_back(std::make_unique<tools::Placed>(lses[s], kGpu));
    gpu_states.push_back({placed[placed.size() - 2]->view(), placed.back()->view()});
  }
  merge_states(cpu_states, cpu_out.view(), cpu_lse.view());
  const tools::Placed out(gpu_out, kGpu), lse(gpu_lse, kGpu);
  merge_states(gpu_states, out.view(), lse.view());
  out.fetch();
  lse.fetch();
  EXPECT_TRUE(gpu_out.buffer().guards_intact());
  const double rounding = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::f16 ? 0x1p-10 : 0.0;  // another way, at most
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const float want = tools::load(cpu_lse.view(), {h, t});
      const float got = tools::load(gpu_lse.view(), {h, t});
      EXPECT_TRUE(got == want || std::fabs(got - want) <= 1e-5F) << got << " " << want;
      for (int64_t d = 0; d < dim; ++d) {
        const double of_cpu = tools::load(cpu_out.view(), {t, h, d});
        EXPECT_NEAR(tools::load(gpu_out.view(), {t, h, d}), of_cpu, 1e-5 + rounding * std::fabs(of_cpu));
      }
    }
  }
}

TEST_F(gpu, merging_agrees_with_the_cpu) {
  for (const int32_t num_states : {1, 2, 3, 17, 97}) expect_merged_as_on_the_cpu(num_states, 72, DType::f32);
  for (const int64_t dim : {4, 12, 100}) expect_merged_as_on_the_cpu(3, dim, DType::f32);  // no whole vectors of 8
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t dim : {8, 64, 128, 192, 264, 512, 528}) expect_merged_as_on_the_cpu(3, dim, dtype);
  }
}

TEST_F(gpu, tensors_of_the_wrong_place_or_alignment_are_refused) {
  auto c = bf16(case_of(4, 2, 64, {1}, {20}));
  tools::CaseData data(c);
  const Attention attention(c.layer, kGpu);
  const Plan plan = attention.plan(data.batch());
  const tools::Placed query(data.query, kGpu), key_pages(data.key_pages, kGpu), value_pages(data.value_pages, kGpu);
  tools::OwnedTensor out_memory(DType::bf16, {1, 4, 64});
  const tools::Placed out(out_memory, kGpu);
  const KvCache cache{key_pages.on_device(data.key_cache), value_pages.on_device(data.value_cache)};
  attention.forward(query.view(), cache, plan, out.view());
  expect_refused([&] { attention.forward(data.query.view(), cache, plan, out.view()); }, ErrorCode::mismatch, "query");
  expect_refused([&] { attention.forward(query.view(), data.cache(), plan, out.view()); }, ErrorCode::mismatch,
                 "cache.key");
  Tensor shifted = query.view();
  shifted.data = static_cast<std::byte*>(shifted.data) + 2;
  expect_refused([&] { attention.forward(shifted, cache, plan, out.view()); }, ErrorCode::invalid_argument, "query");
  Tensor elsewhere = query.view();
  elsewhere.device.index = 1;
  expect_refused([&] { attention.forward(elsewhere, cache, plan, out.view()); }, ErrorCode::mismatch, "query");
}

TEST_F(gpu, a_device_that_is_not_there_is_refused) {
  auto c = bf16(case_of(4, 2, 64, {1}, {20}));
  expect_refused([&] { Attention(c.layer, {DeviceKind::cuda, 99}); }, ErrorCode::unavailable, "device.index");
}

}  // namespace
}  // namespace qkv
