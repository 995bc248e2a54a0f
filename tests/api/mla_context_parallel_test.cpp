// MLA prefill over ranks that exchange states: equal to unchunked attention over random features, whoever keeps which
// latent; what ranks that differ are told; what is refused.
#include "qkv/mla_context_parallel.hpp"

#include <gmock/gmock.h>

#include <cmath>

#include "mla_cases.hpp"
#include "support/rank_threads.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using tools::MlaCase;
using tools::OwnedTensor;
using Ints = std::vector<int32_t>;

constexpr int32_t kHeads = 4, kNope = 16, kRope = 8, kValue = 24, kLatent = 32, kPage = 8;

void on_each_rank(int32_t num_ranks, const std::function<void(const std::shared_ptr<Collectives>&)>& run) {
  test::on_each_rank(in_process_ranks(num_ranks), run);
}

class mla_context_parallel_threads : public ::testing::TestWithParam<int32_t> {};

TEST_P(mla_context_parallel_threads, equal_the_definition_over_random_features) {
  constexpr int64_t kCases = 40;
  for (int64_t index = 0; index < kCases; ++index) {
    const MlaCase c = tools::draw_mla_case(20261130, index, DeviceKind::cpu, GetParam());
    EXPECT_EQ(tools::failure_of(c), "") << tools::describe(c) << "\nqkv check --mla --ranks " << GetParam()
                                        << " --seed 20261130 --first " << index << " --cases 1";
  }
}

INSTANTIATE_TEST_SUITE_P(ranks, mla_context_parallel_threads, ::testing::Values(1, 2, 3, 4, 8));

MlaCase case_by_hand(StateExchange exchange, int32_t num_ranks, const Ints& contexts, const Ints& q,
                     int32_t workspace_tokens) {
  MlaCase c;
  c.attention = testing::case_of(kHeads, kHeads, kNope + kRope, {}, {}, false);
  for (size_t r = 0; r < q.size(); ++r) c.attention.requests.push_back({q[r], contexts[r] + q[r]});
  c.attention.layer.head_dim_v = kValue;
  c.qk_rope_head_dim = kRope;
  c.kv_lora_rank = kLatent;
  c.options.page_size = kPage;
  c.options.workspace_tokens = workspace_tokens;
  c.options.num_ranks = num_ranks;
  c.with_ranks = true;
  c.exchange = exchange;
  return c;
}

void expect_agrees(const MlaCase& c) { EXPECT_EQ(tools::failure_of(c), "") << tools::describe(c); }

// Ranks without a key of a request leave no state, or one that weighs nothing: all workspaces begin as NaN.
TEST(mla_context_parallel, threads_that_keep_no_key_of_a_request) {
  for (const StateExchange exchange :
       {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather}) {
    expect_agrees(case_by_hand(exchange, 4, {1, 2, 0, 3, 5}, {2, 1, 4, 1, 3}, 160));
  }
}

TEST(mla_context_parallel, threads_with_contexts_of_many_chunks) {
  MlaCase c = case_by_hand(StateExchange::all_to_all, 2, {300, 0, 33, 90}, {9, 5, 1, 12}, 80);
  c.options.interleave_size = 4;
  c.attention.layer.mask = mask::causal() & mask::window(40, 0);
  c.attention.layer.sinks = {0.5F, -1.0F, 2.0F, 0.0F};
  expect_agrees(c);
  c.attention.layer.mask = mask::causal() & ((mask::q_head() < MaskValue(2)) | mask::window(7, 0));  // heads differ
  expect_agrees(c);
}

// A rank widens the bytes that it keeps; a result is rounded to 8 bits once, where states have been joined.
TEST(mla_context_parallel, threads_with_8_bit_latents_and_outputs) {
  for (const StateExchange exchange :
       {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather}) {
    for (const OutputScales scales : {OutputScales::per_tensor, OutputScales::per_token_group}) {
      MlaCase c = case_by_hand(exchange, 2, {130, 0, 33, 1}, {9, 5, 1, 3}, 80);
      c.cache_dtype = DType::f8e4m3;
      c.attention.layer.output_dtype = DType::f8e4m3;
      c.attention.layer.output_scales = scales;
      expect_agrees(c);
    }
  }
}

MlaContextParallelSpec small_spec() {
  MlaContextParallelSpec spec;
  spec.layer.num_heads = kHeads;
  spec.layer.qk_nope_head_dim = kNope;
  spec.layer.qk_rope_head_dim = kRope;
  spec.layer.v_head_dim = kValue;
  spec.layer.kv_lora_rank = kLatent;
  spec.layer.dtype = DType::f32;
  spec.layer.cache.page_size = kPage;
  return spec;
}

ContextChunkOptions chunks_of(int32_t workspace_tokens) {
  ContextChunkOptions options;
  options.page_size = kPage;
  options.workspace_tokens = workspace_tokens;
  return options;
}

// One request of three new tokens.
struct Step {
  explicit Step(int32_t context) : lengths{context + 3} {
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(lengths);
    batch.block_table = Tensor::of(table, {1, 3});
  }
  Step(const Step&) = delete;

  Ints starts = {0, 3}, lengths, table = {0, 1, 2};
  Batch batch;
  OwnedTensor query{DType::f32, {3, kHeads / 2, kNope + kRope}}, out{DType::f32, {3, kHeads / 2, kValue}};
  OwnedTensor latents{DType::f32, {3, kLatent + kRope}}, cache{DType::f32, {3, kPage, kLatent + kRope}};
};

// Rank 1 comes only after rank 0 is done: an exchange would wait for it in vain.
TEST(mla_context_parallel, threads_without_any_context_exchange_nothing) {
  std::vector<std::shared_ptr<Collectives>> ranks = in_process_ranks(2);
  std::vector<std::unique_ptr<MlaContextParallel>> layers(2);
  test::on_each_rank(ranks, [&](const std::shared_ptr<Collectives>& own) {
    layers[own->rank()] = std::make_unique<MlaContextParallel>(small_spec(), own);
  });
  OwnedTensor matrix(DType::f32, {kHeads * (kNope + kValue), kLatent});
  const auto fill = [](const OwnedTensor& tensor) {
    std::fill_n(static_cast<float*>(tensor.view().data), tensor.view().num_elements(), 0.5F);
  };
  fill(matrix);
  const Projection projection = matrix_projection(small_spec().layer, matrix.view());
  for (const auto& layer : layers) {
    const Step step(0);
    fill(step.query);
    fill(step.latents);
    const MlaPlan plan = layer->plan(step.batch, chunks_of(32));
    EXPECT_LE(plan.workspace_bytes(), layer->workspace_bytes(3, 32));
    const OwnedTensor workspace(DType::i32, {plan.workspace_bytes() / 4});
    layer->forward(step.query.view(), step.latents.view(), {}, plan, projection, workspace.view(), step.out.view());
    EXPECT_FLOAT_EQ(tools::load(step.out.view(), {2, 1, 0}), 0.25F * kLatent);
  }
}

std::string disagreement(const std::function<void(MlaContextParallelSpec&)>& change) {
  std::vector<std::string> said(2);
  on_each_rank(2, [&](const std::shared_ptr<Collectives>& ranks) {
    MlaContextParallelSpec spec = small_spec();
    if (ranks->rank() == 1) change(spec);
    try {
      const MlaContextParallel attention(spec, ranks);
      said[ranks->rank()] = "nothing";
    } catch (const Error& error) {
      said[ranks->rank()] = error.what();
    }
  });
  EXPECT_EQ(said[1], said[0]);
  return said[0];
}

TEST(mla_context_parallel, threads_that_differ_are_told_in_what) {
  EXPECT_EQ(disagreement([](MlaContextParallelSpec&) {}), "nothing");
  EXPECT_EQ(disagreement([](MlaContextParallelSpec& spec) { spec.interleave_size = 4; }),
            "interleave_size: got 4 on rank 1; allowed: 1, as on rank 0");
  EXPECT_EQ(disagreement([](MlaContextParallelSpec& spec) { spec.layer.kv_lora_rank = 40; }),
            "layer.kv_lora_rank: got 40 on rank 1; allowed: 32, as on rank 0");
  EXPECT_EQ(disagreement([](MlaContextParallelSpec& spec) { spec.layer.mask = mask::everything(); }),
            "layer.mask: got another one on rank 1; allowed: the same on all ranks");
  EXPECT_THAT(disagreement([](MlaContextParallelSpec& spec) { spec.layer.cache_dtype = DType::f8e4m3; }),
              ::testing::StartsWith("layer.cache_dtype: got "));
}

void expect_all_refuse(int32_t num_ranks, const MlaContextParallelSpec& spec, ErrorCode code,
                       const std::string& argument) {
  on_each_rank(num_ranks, [&](const std::shared_ptr<Collectives>& ranks) {
    expect_refused([&] { MlaContextParallel(spec, ranks); }, code, argument);
  });
}

TEST(mla_context_parallel, specs_that_threads_cannot_share_are_refused_on_all_of_them) {
  MlaContextParallelSpec spec = small_spec();
  expect_all_refuse(3, spec, ErrorCode::invalid_argument, "layer.num_heads");
  spec.interleave_size = 0;
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "interleave_size");
  spec = small_spec();
  spec.layer.v_head_dim = 0;
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "v_head_dim");
  expect_refused([] { MlaContextParallel(small_spec(), nullptr); }, ErrorCode::invalid_argument, "collectives");
}

TEST(mla_context_parallel, plans_and_tensors_that_do_not_fit_are_refused_before_any_thread_waits) {
  on_each_rank(2, [](const std::shared_ptr<Collectives>& ranks) {
    const MlaContextParallel attention(small_spec(), ranks);
    EXPECT_EQ(attention.num_heads(), 2);
    EXPECT_EQ(attention.shard().num_ranks, 2);
    const Step step(40);
    OwnedTensor matrix(DType::f32, {kHeads * (kNope + kValue), kLatent});
    const Projection projection = matrix_projection(small_spec().layer, matrix.view());
    const MlaPlan plan = attention.plan(step.batch, chunks_of(32));
    EXPECT_EQ(plan.chunks().size(), 2U);
    EXPECT_LE(plan.workspace_bytes(), attention.workspace_bytes(3, 32));
    const OwnedTensor workspace(DType::i32, {plan.workspace_bytes() / 4});
    const Tensor memory = workspace.view();
    const auto refused = [&](const Tensor& query, const MlaPlan& with, const Tensor& given, ErrorCode code,
                             const char* argument) {
      expect_refused(
          [&] {
            attention.forward(query, step.latents.view(), step.cache.view(), with, projection, given, step.out.view());
          },
          code, argument);
    };
    const OwnedTensor all_heads(DType::f32, {3, kHeads, kNope + kRope});
    refused(all_heads.view(), plan, memory, ErrorCode::mismatch, "query");
    refused(step.query.view(), plan, memory.slice(0, 0, memory.shape[0] - 1), ErrorCode::invalid_argument, "workspace");
    ContextChunkOptions of_latents = chunks_of(32);
    of_latents.num_ranks = 2;
    MlaSpec own_heads = small_spec().layer;
    own_heads.num_heads = 2;
    refused(step.query.view(), MlaPrefill(own_heads).plan(step.batch, of_latents), memory, ErrorCode::mismatch, "plan");
    // A plan of MlaPrefill for a batch without context is of the same layers, and asks for less memory.
    const Step fresh(0);
    const MlaPlan smaller = MlaPrefill(own_heads).plan(fresh.batch, chunks_of(32));
    refused(step.query.view(), smaller, memory.slice(0, 0, smaller.workspace_bytes() / 4), ErrorCode::invalid_argument,
            "workspace");
    const std::vector<float> scale = {1};
    expect_refused(
        [&] {
          attention.forward(step.query.view(), step.latents.view(), step.cache.view(), plan, projection, memory,
                            step.out.view(), {}, {}, {}, {}, testing::view(scale, {1}));
        },
        ErrorCode::mismatch, "latent_scale");
    EXPECT_TRUE(std::isnan(tools::load(step.out.view(), {0, 0, 0})));
    of_latents.num_ranks = 3;
    expect_refused([&] { attention.plan(step.batch, of_latents); }, ErrorCode::mismatch, "options.num_ranks");
  });
}

}  // namespace
}  // namespace qkv
