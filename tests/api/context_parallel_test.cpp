// Layers over several ranks: equal to the definition over random features, whoever keeps which token; what ranks that
// differ are told; what is refused.
#include "qkv/context_parallel.hpp"

#include <cmath>

#include "parallel_cases.hpp"
#include "qkv/reference.hpp"
#include "support/rank_threads.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using tools::OwnedTensor;

LayerSpec small_layer() {
  LayerSpec layer = testing::layer_of(8, 2, 16);
  layer.cache = CacheSpec{16};
  return layer;
}

// `run` on a thread for each rank.
void on_each_rank(int32_t num_ranks, const std::function<void(const std::shared_ptr<Collectives>&)>& run) {
  test::on_each_rank(in_process_ranks(num_ranks), run);
}

class context_parallel_threads : public ::testing::TestWithParam<int32_t> {};

TEST_P(context_parallel_threads, equal_the_definition_over_random_features) {
  constexpr int64_t kCases = 40;
  for (int64_t index = 0; index < kCases; ++index) {
    const tools::ParallelCase c = tools::draw_parallel_case(20261129, index, GetParam());
    EXPECT_EQ(tools::failure_of(c), "") << tools::describe(c) << "\nqkv check --ranks " << GetParam()
                                        << " --seed 20261129 --first " << index << " --cases 1";
  }
}

INSTANTIATE_TEST_SUITE_P(ranks, context_parallel_threads, ::testing::Values(1, 2, 3, 4, 8));

// A case of one decoding request, by hand.
tools::ParallelCase decode_case(int32_t kv_len, int32_t num_ranks, StateExchange exchange) {
  tools::ParallelCase c;
  c.attention = testing::case_of(8, 2, 16, {1}, {kv_len});
  c.num_ranks = num_ranks;
  c.exchange = exchange;
  return c;
}

TEST(context_parallel, casebook_092_long_contexts_over_eight_threads) {
  for (const int32_t kv_len : {12000, 20000, 30001}) {
    const tools::ParallelCase c = decode_case(kv_len, 8, StateExchange::all_to_all);
    EXPECT_EQ(tools::failure_of(c), "") << kv_len;
  }
}

// Ranks without a key leave states with NaN for out: all workspaces begin as NaN.
TEST(context_parallel, casebook_094_threads_that_own_no_key) {
  for (const StateExchange exchange :
       {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather}) {
    for (const int32_t kv_len : {1, 2, 3, 4}) {
      EXPECT_EQ(tools::failure_of(decode_case(kv_len, 8, exchange)), "") << to_string(exchange) << " " << kv_len;
    }
  }
}

TEST(context_parallel, threads_without_any_context_exchange_nothing) {
  on_each_rank(2, [](const std::shared_ptr<Collectives>& ranks) {
    const ContextParallel attention({small_layer()}, ranks);
    const std::vector<int32_t> starts = {0, 3, 3, 5};
    std::vector<int32_t> seq_lens = {3, 0, 2};
    const std::vector<int32_t> table = {0, 1, 2};
    Batch batch;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(seq_lens);
    batch.block_table = Tensor::of(table, {3, 1});
    EXPECT_FALSE(attention.plan(batch).exchanges());
    EXPECT_EQ(attention.plan(batch).workspace_bytes(), 0);
    seq_lens[1] = 1;  // a request without new tokens: nothing to attend to, but a context all the same
    EXPECT_TRUE(attention.plan(batch).exchanges());
    EXPECT_GT(attention.plan(batch).workspace_bytes(), 0);
    EXPECT_LE(attention.plan(batch).workspace_bytes(), attention.workspace_bytes(5));
  });
}

// What a rank with another spec makes all ranks say.
std::string disagreement(const std::function<void(ContextParallelSpec&)>& change) {
  std::vector<std::string> said(3);
  on_each_rank(3, [&](const std::shared_ptr<Collectives>& ranks) {
    ContextParallelSpec spec{small_layer(), 1, StateExchange::all_gather};
    if (ranks->rank() == 1) change(spec);
    try {
      const ContextParallel attention(spec, ranks);
      said[ranks->rank()] = "nothing";
    } catch (const Error& error) {
      said[ranks->rank()] = error.what();
    }
  });
  EXPECT_EQ(said[1], said[0]);
  EXPECT_EQ(said[2], said[0]);
  return said[0];
}

TEST(context_parallel, threads_that_differ_are_told_in_what) {
  EXPECT_EQ(disagreement([](ContextParallelSpec&) {}), "nothing");
  EXPECT_EQ(disagreement([](ContextParallelSpec& spec) { spec.interleave_size = 4; }),
            "interleave_size: got 4 on rank 1; allowed: 1, as on rank 0");
  EXPECT_EQ(disagreement([](ContextParallelSpec& spec) { spec.layer.num_q_heads = 16; }),
            "layer.num_q_heads: got 16 on rank 1; allowed: 8, as on rank 0");
  EXPECT_EQ(disagreement([](ContextParallelSpec& spec) { spec.layer.cache->page_size = 32; }),
            "layer.cache.page_size: got 32 on rank 1; allowed: 16, as on rank 0");
  EXPECT_EQ(disagreement([](ContextParallelSpec& spec) { spec.layer.mask = mask::causal() & mask::window(5, 0); }),
            "layer.mask: got another one on rank 1; allowed: the same on all ranks");
  EXPECT_EQ(disagreement([](ContextParallelSpec& spec) { spec.layer.sinks = std::vector<float>(8, 1.0F); }),
            "layer.sinks: got another one on rank 1; allowed: the same on all ranks");
  EXPECT_EQ(disagreement([](ContextParallelSpec& spec) { spec.exchange = StateExchange::all_to_all; }),
            "exchange: got 0 on rank 1; allowed: 2, as on rank 0");
}

// All ranks refuse alike, so that none is left waiting.
void expect_all_refuse(int32_t num_ranks, const ContextParallelSpec& spec, ErrorCode code,
                       const std::string& argument) {
  on_each_rank(num_ranks, [&](const std::shared_ptr<Collectives>& ranks) {
    expect_refused([&] { ContextParallel(spec, ranks); }, code, argument);
  });
}

TEST(context_parallel, specs_that_ranks_cannot_share_are_refused_on_all_threads) {
  ContextParallelSpec spec{small_layer()};
  expect_all_refuse(3, spec, ErrorCode::invalid_argument, "layer.num_q_heads");
  spec.layer.num_q_heads = 12;
  expect_all_refuse(3, spec, ErrorCode::invalid_argument, "layer.num_kv_heads");
  spec = {small_layer(), 3};
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "interleave_size");  // does not divide pages of 16
  spec = {small_layer()};
  spec.layer.num_kv_heads = 0;
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "num_kv_heads");
  spec = {small_layer()};
  spec.layer.sinks = {1.0F};
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "sinks");
  spec = {small_layer()};
  spec.layer.cache.reset();
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "layer.cache");
  spec = {small_layer()};
  spec.layer.type = AttentionType::encoder_decoder;
  expect_all_refuse(2, spec, ErrorCode::unsupported, "layer.type");
  spec = {small_layer()};
  spec.layer.query_dtype = DType::f8e4m3;
  expect_all_refuse(2, spec, ErrorCode::unsupported, "layer.query_dtype");
  spec = {small_layer()};
  spec.layer.key_run = KeyRun::context;
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "layer.key_run");
  spec = {small_layer()};
  spec.layer.shard.num_ranks = 2;
  expect_all_refuse(2, spec, ErrorCode::invalid_argument, "layer.shard");
  expect_refused([&] { ContextParallel({small_layer()}, nullptr); }, ErrorCode::invalid_argument, "collectives");
}

TEST(context_parallel, tensors_that_do_not_fit_are_refused_before_any_thread_waits) {
  on_each_rank(2, [](const std::shared_ptr<Collectives>& ranks) {
    const ContextParallel attention({small_layer()}, ranks);
    EXPECT_EQ(attention.num_heads(), 4);
    const std::vector<int32_t> starts = {0, 1};
    const std::vector<int32_t> seq_lens = {9};
    const std::vector<int32_t> table = {0};
    Batch batch;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(seq_lens);
    batch.block_table = Tensor::of(table, {1, 1});
    const ContextParallelPlan plan = attention.plan(batch);
    const OwnedTensor query(DType::f32, {1, 4, 16}), all_heads(DType::f32, {1, 8, 16});
    const OwnedTensor key(DType::f32, {1, 2, 16}), pages(DType::f32, {1, 16, 2, 16}), out(DType::f32, {1, 4, 16});
    const OwnedTensor workspace(DType::i32, {plan.workspace_bytes() / 4}), little(DType::i32, {8});
    const KvCache cache{pages.view(), pages.view()};
    const auto refused = [&](const Tensor& q, const Tensor& k, const Tensor& memory, const Tensor& result,
                             ErrorCode code, const char* argument) {
      expect_refused([&] { attention.forward(q, k, key.view(), cache, plan, memory, result); }, code, argument);
    };
    refused(all_heads.view(), key.view(), workspace.view(), out.view(), ErrorCode::mismatch, "query");
    refused(query.view(), query.view(), workspace.view(), out.view(), ErrorCode::mismatch, "key");
    refused(query.view(), key.view(), little.view(), out.view(), ErrorCode::invalid_argument, "workspace");
    refused(query.view(), key.view(), {}, out.view(), ErrorCode::invalid_argument, "workspace");
    refused(query.view(), key.view(), workspace.view(), all_heads.view(), ErrorCode::mismatch, "out");
    EXPECT_TRUE(std::isnan(tools::load(out.view(), {0, 0, 0})));
    expect_refused([&] { attention.update_cache(key.view(), key.view(), cache, plan); }, ErrorCode::invalid_argument,
                   "slot_mapping");
  });
}

}  // namespace
}  // namespace qkv
