// MLA prefill over ranks that exchange states, through the C interface: the C++ calls' own bits on every rank, and what
// is refused.
#include <cmath>
#include <thread>

#include "c_api/c_structs.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::CBatch;
using testing::expect_ok;
using testing::to_c;
using tools::OwnedTensor;

constexpr int32_t kHeads = 4, kNope = 16, kRope = 8, kValue = 24, kLatent = 32, kPage = 8, kPages = 4;
constexpr int32_t kRanks = 2, kInterleave = 4, kOwnHeads = kHeads / kRanks, kTokens = 4, kWorkspaceTokens = 32;
constexpr float kSinks[kHeads] = {0.3F, -0.2F, 0.1F, 0};

MlaSpec small_layer() {
  MlaSpec layer;
  layer.num_heads = kHeads;
  layer.qk_nope_head_dim = kNope;
  layer.qk_rope_head_dim = kRope;
  layer.v_head_dim = kValue;
  layer.kv_lora_rank = kLatent;
  layer.dtype = DType::f32;
  layer.cache.page_size = kPage;
  layer.mask = mask::causal() & mask::window(30, 0);
  layer.sinks.assign(std::begin(kSinks), std::end(kSinks));
  return layer;
}

qkv_mla_spec small_layer_in_c() {
  qkv_mla_spec layer;
  qkv_mla_spec_init(&layer, sizeof layer);
  layer.num_heads = kHeads;
  layer.qk_nope_head_dim = kNope;
  layer.qk_rope_head_dim = kRope;
  layer.v_head_dim = kValue;
  layer.kv_lora_rank = kLatent;
  layer.dtype = QKV_F32;
  layer.page_size = kPage;
  layer.mask = "causal & window(30, 0)";
  layer.sinks = kSinks;
  layer.num_sinks = kHeads;
  return layer;
}

qkv_context_chunk_options chunks_in_c() {
  qkv_context_chunk_options options;
  qkv_context_chunk_options_init(&options, sizeof options);
  options.workspace_tokens = kWorkspaceTokens;
  options.page_size = kPage;
  return options;
}

OwnedTensor filled(int64_t index, std::initializer_list<int64_t> shape) {
  tools::Draw draw(31, index);
  return testing::normal_values(draw, 0.3F, shape);
}

// What one rank has, the same whenever it is made: two requests, of 3 and 1 new tokens.
struct RankData {
  explicit RankData(int32_t rank)
      : query(filled(10 + rank, {kTokens, kOwnHeads, kNope + kRope})),
        cache(filled(20 + rank, {kPages, kPage, kLatent + kRope})) {
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(lengths);
    batch.block_table = Tensor::contiguous(table.data(), DType::i32, {2, 3});
  }
  RankData(const RankData&) = delete;

  bool operator==(const RankData& other) const {
    return out.buffer() == other.out.buffer() && lse.buffer() == other.lse.buffer();
  }

  std::vector<int32_t> starts = {0, 3, 4}, lengths = {41, 16}, table = {2, 0, 1, 3, -1, -1};
  Batch batch;
  OwnedTensor query, cache;
  OwnedTensor new_latents = filled(1, {kTokens, kLatent + kRope});
  OwnedTensor matrix = filled(2, {kHeads * (kNope + kValue), kLatent});
  OwnedTensor out{DType::f32, {kTokens, kOwnHeads, kValue}}, lse{DType::f32, {kOwnHeads, kTokens}};
};

void run_cpp(const std::shared_ptr<Collectives>& ranks, StateExchange exchange, RankData& data) {
  const MlaContextParallel attention({small_layer(), kInterleave, exchange}, ranks);
  ContextChunkOptions options;
  options.workspace_tokens = kWorkspaceTokens;
  options.page_size = kPage;
  const MlaPlan plan = attention.plan(data.batch, options);
  const OwnedTensor workspace(DType::i32, {plan.workspace_bytes() / 4});
  attention.forward(data.query.view(), data.new_latents.view(), data.cache.view(), plan,
                    matrix_projection(small_layer(), data.matrix.view()), workspace.view(), data.out.view(),
                    data.lse.view());
}

void expect_shape(const qkv_mla_context_parallel* attention, int32_t rank) {
  qkv_shard shard;
  int32_t num_heads = 0;
  expect_ok(qkv_mla_context_parallel_shard(attention, &shard));
  expect_ok(qkv_mla_context_parallel_num_heads(attention, &num_heads));
  EXPECT_EQ(num_heads, kOwnHeads);
  EXPECT_EQ(shard.rank, rank);
  EXPECT_EQ(shard.num_ranks, kRanks);
  EXPECT_EQ(shard.interleave_size, kInterleave);
}

// Of the plan, and no more than the layer says for its sizes.
int64_t workspace_bytes(const qkv_mla_context_parallel* attention, const qkv_mla_plan* plan) {
  int64_t bytes = 0, most_bytes = 0;
  expect_ok(qkv_mla_plan_workspace_bytes(plan, &bytes));
  expect_ok(qkv_mla_context_parallel_workspace_bytes(attention, kTokens, kWorkspaceTokens, &most_bytes));
  EXPECT_LE(bytes, most_bytes);
  return bytes;
}

void run_c(qkv_collectives* ranks, int32_t rank, qkv_state_exchange exchange, const qkv_stream* gather_stream,
           RankData& data) {
  const qkv_mla_spec layer = small_layer_in_c();
  const qkv_context_chunk_options options = chunks_in_c();
  const CBatch batch(data.batch);
  const qkv_tensor query = to_c(data.query.view()), latents = to_c(data.new_latents.view());
  const qkv_tensor cache = to_c(data.cache.view()), matrix = to_c(data.matrix.view());
  const qkv_tensor out = to_c(data.out.view()), lse = to_c(data.lse.view());
  qkv_mla_context_parallel* attention = nullptr;
  qkv_projection* projection = nullptr;
  qkv_mla_plan* plan = nullptr;
  expect_ok(qkv_mla_context_parallel_create(&layer, kInterleave, exchange, ranks, &attention));
  expect_shape(attention, rank);
  expect_ok(qkv_matrix_projection_create(&layer, &matrix, &projection));
  expect_ok(qkv_mla_context_parallel_plan(attention, &batch.batch, &options, &plan, nullptr));
  int32_t num_chunks = 0;
  expect_ok(qkv_mla_plan_num_chunks(plan, &num_chunks));
  EXPECT_EQ(num_chunks, 2);
  const OwnedTensor memory(DType::i32, {workspace_bytes(attention, plan) / 4});
  const qkv_tensor workspace = to_c(memory.view());
  expect_ok(qkv_mla_context_parallel_forward(attention, &query, &latents, &cache, plan, projection, &workspace, &out,
                                             &lse, nullptr, nullptr, gather_stream, nullptr));
  qkv_mla_plan_destroy(plan);
  qkv_projection_destroy(projection);
  qkv_mla_context_parallel_destroy(attention);
}

void expect_same_bits(StateExchange exchange, const qkv_stream* gather_stream) {
  const auto cpp_ranks = in_process_ranks(kRanks);
  qkv_collectives* c_ranks[kRanks] = {};
  expect_ok(qkv_in_process_ranks(kRanks, {QKV_CPU, 0}, 0, c_ranks));
  const auto body = [&](int32_t rank) {
    RankData cpp(rank), through_c(rank);
    run_cpp(cpp_ranks[rank], exchange, cpp);
    run_c(c_ranks[rank], rank, static_cast<qkv_state_exchange>(exchange), gather_stream, through_c);
    EXPECT_FALSE(std::isnan(tools::load(cpp.out.view(), {kTokens - 1, kOwnHeads - 1, kValue - 1})));
    EXPECT_TRUE(cpp == through_c) << to_string(exchange) << ", rank " << rank;
    qkv_collectives_destroy(c_ranks[rank]);
  };
  std::thread other(body, 1);
  body(0);
  other.join();
}

TEST(c_mla_context_parallel, threads_do_what_their_cpp_namesakes_do) {
  const qkv_stream beside = nullptr;  // a CPU has none; all the same, the parameter is taken
  expect_same_bits(StateExchange::all_to_all, nullptr);
  expect_same_bits(StateExchange::reduce_scatter, &beside);
}

struct c_mla_context_parallel_alone : ::testing::Test {
  c_mla_context_parallel_alone() { expect_ok(qkv_in_process_ranks(1, {QKV_CPU, 0}, 0, &ranks)); }
  ~c_mla_context_parallel_alone() override { qkv_collectives_destroy(ranks); }

  qkv_mla_spec layer = small_layer_in_c();
  qkv_context_chunk_options options = chunks_in_c();
  qkv_collectives* ranks = nullptr;
};

TEST_F(c_mla_context_parallel_alone, refused_layers_leave_no_handle) {
  int anything = 0;
  auto* attention = reinterpret_cast<qkv_mla_context_parallel*>(&anything);
  EXPECT_EQ(qkv_mla_context_parallel_create(&layer, 1, 3, ranks, &attention), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_message(), "exchange: got 3; allowed: 0 (all_to_all) to 2 (all_gather)");
  EXPECT_EQ(attention, nullptr);
  const auto expect_names = [&](const qkv_mla_spec* spec, int32_t interleave_size, const qkv_collectives* with,
                                const char* argument) {
    EXPECT_EQ(qkv_mla_context_parallel_create(spec, interleave_size, QKV_EXCHANGE_ALL_TO_ALL, with, &attention),
              QKV_INVALID_ARGUMENT);
    EXPECT_STREQ(qkv_last_error_argument(), argument);
  };
  expect_names(&layer, 0, ranks, "interleave_size");
  expect_names(&layer, 1, nullptr, "ranks");
  expect_names(nullptr, 1, ranks, "spec");
  EXPECT_EQ(qkv_mla_context_parallel_create(&layer, 1, QKV_EXCHANGE_ALL_TO_ALL, ranks, nullptr), QKV_INVALID_ARGUMENT);
  layer.v_head_dim = 0;
  expect_names(&layer, 1, ranks, "v_head_dim");
  qkv_mla_context_parallel_destroy(nullptr);
}

TEST_F(c_mla_context_parallel_alone, refused_plans_and_calls_are_statuses) {
  qkv_mla_context_parallel* attention = nullptr;
  expect_ok(qkv_mla_context_parallel_create(&layer, 1, QKV_EXCHANGE_ALL_TO_ALL, ranks, &attention));
  qkv_collectives_destroy(ranks);  // the layer keeps what it needs of it
  ranks = nullptr;
  RankData data(0);
  data.lengths = {20, 9};
  data.batch.seq_lens = testing::view(data.lengths);
  const CBatch batch(data.batch);
  qkv_mla_plan* plan = nullptr;
  EXPECT_EQ(qkv_mla_context_parallel_plan(nullptr, &batch.batch, &options, &plan, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_mla_context_parallel_plan(attention, &batch.batch, nullptr, &plan, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "options");
  options.num_ranks = 2;
  EXPECT_EQ(qkv_mla_context_parallel_plan(attention, &batch.batch, &options, &plan, nullptr), QKV_MISMATCH);
  EXPECT_STREQ(qkv_last_error_argument(), "options.num_ranks");
  EXPECT_EQ(plan, nullptr);
  int64_t bytes = 0;
  EXPECT_EQ(qkv_mla_context_parallel_workspace_bytes(attention, -1, 16, &bytes), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "max_new_tokens");
  EXPECT_EQ(qkv_mla_context_parallel_shard(attention, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_mla_context_parallel_num_heads(nullptr, nullptr), QKV_INVALID_ARGUMENT);

  options.num_ranks = 0;
  expect_ok(qkv_mla_context_parallel_plan(attention, &batch.batch, &options, &plan, nullptr));
  const qkv_tensor query = to_c(data.query.view());
  EXPECT_EQ(qkv_mla_context_parallel_forward(attention, &query, nullptr, nullptr, plan, nullptr, nullptr, nullptr,
                                             nullptr, nullptr, nullptr, nullptr, nullptr),
            QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "projection");
  qkv_mla_plan_destroy(plan);
  qkv_mla_context_parallel_destroy(attention);
}

}  // namespace
}  // namespace qkv
