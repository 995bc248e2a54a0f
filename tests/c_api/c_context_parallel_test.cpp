// Context parallelism through the C interface: the C++ calls' own bits on every rank, and what is refused.
#include <thread>

#include "c_api/c_structs.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::CBatch;
using testing::CSpec;
using testing::expect_ok;
using testing::to_c;
using tools::OwnedTensor;

constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 16, kPages = 4, kPage = 16;
constexpr int32_t kRanks = 2, kInterleave = 4;

LayerSpec small_layer() {
  LayerSpec layer = testing::layer_of(kHeads, kKvHeads, kHeadDim);
  layer.cache = CacheSpec{kPage};
  layer.mask = mask::causal() & mask::window(30, 0);
  layer.sinks = {0.3F, -0.2F, 0.1F, 0};
  return layer;
}

OwnedTensor filled(int64_t seed, std::initializer_list<int64_t> shape) {
  tools::Draw draw(29, seed);
  OwnedTensor tensor(DType::f32, shape);
  auto* values = static_cast<float*>(tensor.view().data);
  for (int64_t i = 0; i < tensor.view().num_elements(); ++i) values[i] = draw.normal();
  return tensor;
}

// What one rank has, the same whenever it is made: two requests, of 3 and 1 new tokens.
struct RankData {
  explicit RankData(int32_t rank)
      : query(filled(10 + rank, {4, kHeads / kRanks, kHeadDim})),
        pages(filled(20 + rank, {kPages, kPage, kKvHeads, kHeadDim})) {
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(lengths);
    batch.block_table = Tensor::contiguous(table.data(), DType::i32, {2, 2});
  }
  RankData(const RankData&) = delete;

  bool operator==(const RankData& other) const {
    return out.buffer() == other.out.buffer() && lse.buffer() == other.lse.buffer() &&
           pages.buffer() == other.pages.buffer();
  }

  std::vector<int32_t> starts = {0, 3, 4}, lengths = {41, 20}, table = {2, 0, 1, 3};
  std::vector<int64_t> slots = std::vector<int64_t>(4);
  Batch batch;
  OwnedTensor query, pages;
  OwnedTensor key = filled(1, {4, kKvHeads, kHeadDim}), value = filled(2, {4, kKvHeads, kHeadDim});
  OwnedTensor out{DType::f32, {4, kHeads / kRanks, kHeadDim}}, lse{DType::f32, {kHeads / kRanks, 4}};
};

PlanLimits limits() {
  PlanLimits limits;
  limits.max_requests = 2;
  limits.max_tokens = 4;
  limits.max_seq_len = 64;
  limits.num_pages = kPages;
  return limits;
}

void run_cpp(const std::shared_ptr<Collectives>& ranks, StateExchange exchange, bool with_planner, RankData& data) {
  const ContextParallel attention({small_layer(), kInterleave, exchange}, ranks);
  data.slots = shard_slots(data.batch, kPage, attention.shard());
  data.batch.slot_mapping = testing::view(data.slots);
  std::optional<ContextParallelPlanner> planner;
  if (with_planner) planner.emplace(attention.planner(limits()));
  const ContextParallelPlan plan = planner ? planner->plan(data.batch) : attention.plan(data.batch);
  const OwnedTensor workspace(DType::i32, {plan.workspace_bytes() / 4});
  const KvCache cache{data.pages.view(), data.pages.view()};
  attention.update_cache(data.key.view(), data.value.view(), cache, plan);
  attention.forward(data.query.view(), data.key.view(), data.value.view(), cache, plan, workspace.view(),
                    data.out.view(), data.lse.view());
}

qkv_parallel_plan* plan_in_c(const qkv_context_parallel* attention, qkv_parallel_planner* planner,
                             const qkv_batch& batch) {
  qkv_parallel_plan* plan = nullptr;
  if (planner == nullptr) {
    expect_ok(qkv_context_parallel_plan(attention, &batch, &plan, nullptr));
  } else {
    expect_ok(qkv_parallel_planner_plan(planner, &batch, &plan, nullptr));
    expect_ok(qkv_parallel_planner_check(planner, nullptr));
  }
  return plan;
}

void run_c(qkv_collectives* ranks, qkv_state_exchange exchange, bool with_planner, RankData& data) {
  const LayerSpec spec = small_layer();
  const CSpec layer(spec);
  qkv_context_parallel* attention = nullptr;
  expect_ok(qkv_context_parallel_create(&layer.spec, kInterleave, exchange, ranks, &attention));
  qkv_shard shard;
  int32_t num_heads = 0, exchanges = 0;
  expect_ok(qkv_context_parallel_shard(attention, &shard));
  expect_ok(qkv_context_parallel_num_heads(attention, &num_heads));
  EXPECT_EQ(num_heads, kHeads / kRanks);
  EXPECT_EQ(shard.num_ranks, kRanks);
  EXPECT_EQ(shard.interleave_size, kInterleave);
  const CBatch unslotted(data.batch);
  expect_ok(qkv_shard_slots(&unslotted.batch, kPage, &shard, data.slots.data(), 4));
  data.batch.slot_mapping = testing::view(data.slots);
  const CBatch batch(data.batch);

  qkv_parallel_planner* planner = nullptr;
  qkv_plan_limits largest;
  qkv_plan_limits_init(&largest, sizeof largest);
  largest.max_requests = limits().max_requests;
  largest.max_tokens = limits().max_tokens;
  largest.max_seq_len = limits().max_seq_len;
  largest.num_pages = limits().num_pages;
  if (with_planner) expect_ok(qkv_context_parallel_planner(attention, &largest, &planner));
  qkv_parallel_plan* plan = plan_in_c(attention, planner, batch.batch);
  int64_t bytes = 0, most_bytes = 0;
  expect_ok(qkv_parallel_plan_workspace_bytes(plan, &bytes));
  expect_ok(qkv_context_parallel_workspace_bytes(attention, 4, &most_bytes));
  EXPECT_EQ(bytes, most_bytes);
  expect_ok(qkv_parallel_plan_exchanges(plan, &exchanges));
  EXPECT_EQ(exchanges, 1);

  const OwnedTensor memory(DType::i32, {bytes / 4});
  const qkv_tensor query = to_c(data.query.view()), key = to_c(data.key.view()), value = to_c(data.value.view());
  const qkv_tensor out = to_c(data.out.view()), lse = to_c(data.lse.view()), workspace = to_c(memory.view());
  const qkv_kv_cache cache = to_c(KvCache{data.pages.view(), data.pages.view()});
  expect_ok(qkv_context_parallel_update_cache(attention, &key, &value, &cache, plan, nullptr));
  const qkv_stream beside = nullptr;
  expect_ok(qkv_context_parallel_forward(attention, &query, &key, &value, &cache, plan, &workspace, &out, &lse, nullptr,
                                         with_planner ? &beside : nullptr, nullptr));
  qkv_parallel_plan_destroy(plan);
  qkv_parallel_planner_destroy(planner);
  qkv_context_parallel_destroy(attention);
}

void expect_same_bits(StateExchange exchange, bool with_planner) {
  const auto cpp_ranks = in_process_ranks(kRanks);
  qkv_collectives* c_ranks[kRanks] = {};
  expect_ok(qkv_in_process_ranks(kRanks, {QKV_CPU, 0}, 0, c_ranks));
  const auto body = [&](int32_t rank) {
    RankData cpp(rank), through_c(rank);
    run_cpp(cpp_ranks[rank], exchange, with_planner, cpp);
    run_c(c_ranks[rank], static_cast<qkv_state_exchange>(exchange), with_planner, through_c);
    EXPECT_TRUE(cpp == through_c) << to_string(exchange) << ", rank " << rank;
    qkv_collectives_destroy(c_ranks[rank]);
  };
  std::thread other(body, 1);
  body(0);
  other.join();
}

TEST(c_context_parallel, threads_do_what_their_cpp_namesakes_do) {
  for (const StateExchange exchange : {StateExchange::all_to_all, StateExchange::reduce_scatter}) {
    expect_same_bits(exchange, false);
    expect_same_bits(exchange, true);
  }
}

TEST(c_context_parallel, refusals_are_statuses_and_leave_no_handle) {
  qkv_collectives* ranks = nullptr;
  expect_ok(qkv_in_process_ranks(1, {QKV_CPU, 0}, 0, &ranks));
  const LayerSpec spec = small_layer();
  const CSpec layer(spec);
  int anything = 0;
  auto* attention = reinterpret_cast<qkv_context_parallel*>(&anything);
  EXPECT_EQ(qkv_context_parallel_create(&layer.spec, 1, 3, ranks, &attention), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_message(), "exchange: got 3; allowed: 0 (all_to_all) to 2 (all_gather)");
  EXPECT_EQ(attention, nullptr);
  EXPECT_EQ(qkv_context_parallel_create(&layer.spec, 0, QKV_EXCHANGE_ALL_TO_ALL, ranks, &attention),
            QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "interleave_size");
  EXPECT_EQ(qkv_context_parallel_create(&layer.spec, 1, QKV_EXCHANGE_ALL_TO_ALL, nullptr, &attention),
            QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "ranks");
  EXPECT_EQ(qkv_context_parallel_create(nullptr, 1, QKV_EXCHANGE_ALL_TO_ALL, ranks, &attention), QKV_INVALID_ARGUMENT);

  expect_ok(qkv_context_parallel_create(&layer.spec, 1, QKV_EXCHANGE_ALL_TO_ALL, ranks, &attention));
  qkv_collectives_destroy(ranks);  // the layer keeps what it needs of it
  RankData data(0);
  data.lengths = {30, 20};
  data.batch.seq_lens = testing::view(data.lengths);
  const CBatch batch(data.batch);
  qkv_parallel_plan* plan = nullptr;
  EXPECT_EQ(qkv_context_parallel_plan(nullptr, &batch.batch, &plan, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_context_parallel_planner(attention, nullptr, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_parallel_planner_plan(nullptr, &batch.batch, &plan, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_parallel_plan_exchanges(nullptr, nullptr), QKV_INVALID_ARGUMENT);
  expect_ok(qkv_context_parallel_plan(attention, &batch.batch, &plan, nullptr));
  const qkv_kv_cache cache = to_c(KvCache{data.pages.view(), data.pages.view()});
  EXPECT_EQ(qkv_context_parallel_forward(attention, nullptr, nullptr, nullptr, &cache, plan, nullptr, nullptr, nullptr,
                                         nullptr, nullptr, nullptr),
            QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "query");
  qkv_parallel_plan_destroy(plan);
  qkv_context_parallel_destroy(attention);
  qkv_parallel_plan_destroy(nullptr);
  qkv_parallel_planner_destroy(nullptr);
  qkv_context_parallel_destroy(nullptr);
}

}  // namespace
}  // namespace qkv
