// Through the C interface, each call does what its C++ namesake does, bit for bit.
#include <cstddef>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>

#include "c_api/c_structs.hpp"
#include "case_data.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::CBatch;
using testing::create;
using testing::CSpec;
using testing::expect_ok;
using testing::make_plan;
using testing::text_of;
using testing::to_c;
using testing::view;
using tools::Case;
using tools::CaseData;
using tools::OwnedTensor;

// All that a case's calls write: out and lse with guard words and padding rows, and the cache's pages.
struct Written {
  explicit Written(const Case& c)  // the data keeps the case by address
      : data(c),
        out(c.layer.out_dtype(), {data.num_tokens + c.extra_rows, c.layer.num_q_heads, c.layer.value_dim()}),
        lse(DType::f32, {c.layer.num_q_heads, data.num_tokens + c.extra_rows}) {}
  CaseData data;
  OwnedTensor out;
  OwnedTensor lse;
};

void run_cpp(const Case& c, Written& w) {
  const Attention attention(c.layer);
  const Plan plan = attention.plan(w.data.batch());
  const Tensor lse = c.with_lse ? w.lse.view() : Tensor{};
  if (c.layer.cache) {
    attention.update_cache(w.data.key.view(), w.data.value.view(), w.data.cache(), plan);
    attention.forward(w.data.query.view(), w.data.cache(), plan, w.out.view(), lse, {}, w.data.out_scale.view(),
                      w.data.query_scale.view());
  } else {
    attention.forward(w.data.query.view(), w.data.key.view(), w.data.value.view(), plan, w.out.view(), lse, {},
                      w.data.out_scale.view(), w.data.query_scale.view(), w.data.key_scale.view(),
                      w.data.value_scale.view());
  }
}

void run_c(const Case& c, Written& w, qkv_stream stream = nullptr) {
  const CSpec spec(c.layer);
  const CBatch batch(w.data.batch());
  const auto attention = create(spec.spec);
  const auto plan = make_plan(attention, batch.batch);
  const qkv_tensor query = to_c(w.data.query.view()), key = to_c(w.data.key.view()), value = to_c(w.data.value.view());
  const qkv_tensor out = to_c(w.out.view()), lse = to_c(w.lse.view());
  const qkv_tensor* wanted_lse = c.with_lse ? &lse : nullptr;
  const qkv_tensor out_scale = to_c(w.data.out_scale.view()), query_scale = to_c(w.data.query_scale.view());
  if (c.layer.cache) {
    const qkv_kv_cache cache = to_c(w.data.cache());
    expect_ok(qkv_attention_update_cache(attention.get(), &key, &value, &cache, plan.get(), stream));
    expect_ok(qkv_attention_forward(attention.get(), &query, &cache, plan.get(), &out, wanted_lse, &out_scale,
                                    &query_scale, stream));
  } else {
    const qkv_tensor key_scale = to_c(w.data.key_scale.view()), value_scale = to_c(w.data.value_scale.view());
    expect_ok(qkv_attention_forward_dense(attention.get(), &query, &key, &value, plan.get(), &out, wanted_lse,
                                          &out_scale, &query_scale, &key_scale, &value_scale, stream));
  }
}

void expect_same_bits(const Case& c) {
  Written cpp(c), through_c(c);
  run_cpp(c, cpp);
  run_c(c, through_c);
  EXPECT_TRUE(cpp.out.buffer() == through_c.out.buffer()) << describe(c);
  EXPECT_TRUE(cpp.lse.buffer() == through_c.lse.buffer()) << describe(c);
  EXPECT_TRUE(cpp.data.key_pages.buffer() == through_c.data.key_pages.buffer()) << describe(c);
  EXPECT_TRUE(cpp.data.value_pages.buffer() == through_c.data.value_pages.buffer()) << describe(c);
  EXPECT_TRUE(cpp.data.key_scale.buffer() == through_c.data.key_scale.buffer()) << describe(c);
  EXPECT_TRUE(cpp.data.value_scale.buffer() == through_c.data.value_scale.buffer()) << describe(c);
  EXPECT_TRUE(cpp.data.out_scale.buffer() == through_c.data.out_scale.buffer()) << describe(c);
}

TEST(c_api, paged_decode_has_the_bits_of_cpp) {
  expect_same_bits(case_of(8, 2, 64, {1, 1, 1}, {300, 1, 40}));
  Case c = case_of(8, 2, 64, {1, 1}, {90, 35});
  c.layer.kv_dtype = DType::bf16;
  c.layer.output_dtype = DType::f16;
  c.layer.sinks.assign(8, 0.5F);
  c.layer.scale = 0.2F;
  c.layer.softcap = 20;
  expect_same_bits(c);
}

TEST(c_api, outputs_of_8_bits_have_the_bits_of_cpp) {
  for (const OutputScales scales : {OutputScales::per_tensor, OutputScales::per_token_group}) {
    Case c = case_of(8, 2, 192, {1, 20}, {300, 40});
    c.layer.output_dtype = DType::f8e4m3;
    c.layer.output_scales = scales;
    expect_same_bits(c);
  }
}

TEST(c_api, prefill_has_the_bits_of_cpp) {
  expect_same_bits(case_of(8, 2, 64, {70, 33}, {100, 33}));
  expect_same_bits(case_of(4, 4, 32, {50}, {50}, false));
}

TEST(c_api, the_cpu_ignores_streams) {
  for (const bool paged : {true, false}) {
    const Case c = case_of(4, 2, 32, {5}, {5}, paged);
    Written without(c), with(c);
    run_c(c, without);
    int no_stream_at_all = 0;
    run_c(c, with, &no_stream_at_all);
    EXPECT_TRUE(without.out.buffer() == with.out.buffer());
  }
}

// Masks, operands, slopes, layouts: every field of a spec and a batch is set by some of these.
TEST(c_api, random_cases_have_the_bits_of_cpp) {
  for (int64_t index = 0; index < 150; ++index) expect_same_bits(tools::draw_case(20261129, index));
}

TEST(c_api, plans_answer_what_cpp_plans_answer) {
  const Case c = case_of(8, 2, 64, {1, 40}, {5000, 40});
  CaseData data(c);
  const Plan expected = Attention(c.layer).plan(data.batch());
  const CSpec spec(c.layer);
  const CBatch batch(data.batch());
  auto attention = create(spec.spec);
  const auto plan = make_plan(attention, batch.batch);
  attention.reset();  // a plan outlives the attention that made it
  int32_t num_requests = 0;
  int64_t num_tokens = 0, num_work_items = 0, workspace_bytes = 0;
  expect_ok(qkv_plan_num_requests(plan.get(), &num_requests));
  expect_ok(qkv_plan_num_tokens(plan.get(), &num_tokens));
  expect_ok(qkv_plan_num_work_items(plan.get(), &num_work_items));
  expect_ok(qkv_plan_workspace_bytes(plan.get(), &workspace_bytes));
  EXPECT_EQ(num_requests, 2);
  EXPECT_EQ(num_tokens, 41);
  EXPECT_EQ(num_work_items, expected.num_work_items());
  EXPECT_GT(workspace_bytes, 0);
  EXPECT_EQ(workspace_bytes, expected.workspace_bytes());
  EXPECT_EQ(text_of([&](char* text, size_t capacity, size_t* needed) {
              return qkv_plan_dump(plan.get(), text, capacity, needed);
            }),
            expected.dump());
}

TEST(c_api, interleaved_cache_views_are_those_of_cpp) {
  const std::vector<float> pages(3 * 2 * 16 * 20);
  const Tensor key_value = view(pages, {3, 2, 16, 20});
  const KvCache expected = KvCache::from_interleaved(key_value, 12);
  const int64_t shape[] = {3, 2, 16, 20};
  qkv_tensor c_key_value = qkv_tensor_contiguous(pages.data(), QKV_F32, 4, shape);
  c_key_value.device = {QKV_CUDA, 1};  // views know no device: they keep it
  qkv_kv_cache cache{};
  expect_ok(qkv_kv_cache_from_interleaved(&c_key_value, 12, &cache));
  EXPECT_EQ(cache.key.data, expected.key.data);
  EXPECT_EQ(cache.value.data, expected.value.data);
  EXPECT_EQ(cache.value.device.kind, QKV_CUDA);
  EXPECT_EQ(cache.value.device.index, 1);
  EXPECT_EQ(cache.value.rank, 4);
  EXPECT_TRUE(std::equal(expected.value.shape.begin(), expected.value.shape.end(), cache.value.shape));
  EXPECT_TRUE(std::equal(expected.value.stride.begin(), expected.value.stride.end(), cache.value.stride));
}

TEST(c_api, varlen_attention_has_the_bits_of_cpp) {
  const Case two_requests = case_of(4, 2, 32, {9, 1}, {9, 20}, false);
  Written w(two_requests), c(two_requests);
  const Batch batch = w.data.batch();
  const std::vector<int32_t> causal = {1, 0};
  const std::vector<float> slopes = {0.1F, 0.2F, 0.3F, 0.4F}, sinks = {0, 1, 2, 3};
  VarlenArguments arguments;
  arguments.query = w.data.query.view();
  arguments.key = w.data.key.view();
  arguments.value = w.data.value.view();
  arguments.query_start_loc = batch.query_start_loc;
  arguments.seq_lens = batch.seq_lens;
  arguments.mask = mask::per_request_causal();
  arguments.mask_operands = {{"causal", view(causal)}};
  arguments.scale = 0.3F;
  arguments.softcap = 5;
  arguments.alibi_slopes = view(slopes, {4});
  arguments.sinks = view(sinks, {4});
  arguments.out = w.out.view();
  arguments.lse = w.lse.view();
  varlen_attention(arguments);

  const qkv_mask_operand operand = {"causal", to_c(view(causal))};
  qkv_varlen_arguments c_arguments;
  qkv_varlen_arguments_init(&c_arguments, sizeof c_arguments);
  c_arguments.query = to_c(c.data.query.view());
  c_arguments.key = to_c(c.data.key.view());
  c_arguments.value = to_c(c.data.value.view());
  c_arguments.query_start_loc = to_c(batch.query_start_loc);
  c_arguments.seq_lens = to_c(batch.seq_lens);
  c_arguments.mask = "per_request_causal";
  c_arguments.mask_operands = &operand;
  c_arguments.num_mask_operands = 1;
  c_arguments.has_scale = 1;
  c_arguments.scale = 0.3F;
  c_arguments.softcap = 5;
  c_arguments.alibi_slopes = to_c(view(slopes, {4}));
  c_arguments.sinks = to_c(view(sinks, {4}));
  c_arguments.out = to_c(c.out.view());
  c_arguments.lse = to_c(c.lse.view());
  expect_ok(qkv_varlen_attention(&c_arguments));
  EXPECT_TRUE(w.out.buffer() == c.out.buffer());
  EXPECT_TRUE(w.lse.buffer() == c.lse.buffer());

  // Without a mask everything is visible, which row 0 of a causal request is not.
  const float before = tools::load(c.lse.view(), {0, 0});
  c_arguments.mask = nullptr;
  expect_ok(qkv_varlen_attention(&c_arguments));
  EXPECT_NE(tools::load(c.lse.view(), {0, 0}), before);
}

TEST(c_api, states_merge_and_base_2_becomes_natural) {
  const std::vector<float> first(2 * 1 * 8, 1.0F), second(2 * 1 * 8, 3.0F);
  const std::vector<float> first_lse = {0, 5}, second_lse = {0, -std::numeric_limits<float>::infinity()};
  std::vector<float> out(2 * 1 * 8), lse(2);
  const qkv_state states[] = {{to_c(view(first, {2, 1, 8})), to_c(view(first_lse, {1, 2}))},
                              {to_c(view(second, {2, 1, 8})), to_c(view(second_lse, {1, 2}))}};
  const qkv_tensor out_view = to_c(view(out, {2, 1, 8})), lse_view = to_c(view(lse, {1, 2}));
  expect_ok(qkv_merge_states(states, 2, &out_view, &lse_view, nullptr, nullptr));
  EXPECT_FLOAT_EQ(out[0], 2);  // equal weights
  EXPECT_EQ(out[8], 1);        // the second state is empty
  EXPECT_FLOAT_EQ(lse[0], 0.69314718F);
  EXPECT_EQ(lse[1], 5);

  lse = {1, 2};
  expect_ok(qkv_lse_from_lse2(&lse_view));
  EXPECT_FLOAT_EQ(lse[0], 0.69314718F);
  EXPECT_FLOAT_EQ(lse[1], 1.38629436F);
}

TEST(c_api, rows_are_rounded_with_scales_that_are_chosen) {
  const std::vector<float> rows = {-896, 448, 2, 0, 3.5F, 1.75F, 0, 0};
  std::vector<uint8_t> bytes(8, 0xAA);
  std::vector<float> scales(2);
  const qkv_tensor rows_view = to_c(view(rows, {1, 2, 4})), scale_view = to_c(view(scales, {2}));
  const qkv_tensor out_view = to_c(Tensor::contiguous(bytes.data(), DType::f8e4m3, {1, 2, 4}));
  expect_ok(qkv_quantise(&rows_view, &out_view, &scale_view, QKV_SCALES_CHOSEN, nullptr, nullptr));
  EXPECT_EQ(scales, (std::vector<float>{2, 0.0078125F}));
  EXPECT_EQ(bytes, (std::vector<uint8_t>{0xFE, 0x76, 0x38, 0, 0x7E, 0x76, 0, 0}));  // -448, 224, 1; 448, 224
  expect_ok(qkv_quantise(&rows_view, &out_view, &scale_view, QKV_SCALES_GIVEN, nullptr, nullptr));
  EXPECT_EQ(bytes[4], 0x7E);
  EXPECT_EQ(qkv_quantise(&rows_view, &out_view, &scale_view, 2, nullptr, nullptr), QKV_INVALID_ARGUMENT);
}

TEST(c_api, cache_write_writes_the_slots) {
  std::vector<float> key_pages(2 * 4 * 1 * 8), value_pages(2 * 4 * 1 * 8);
  const std::vector<float> key(2 * 8, 5.0F), value(2 * 8, 6.0F);
  const std::vector<int64_t> slots = {6, -1};
  const qkv_kv_cache cache = {to_c(view(key_pages, {2, 4, 1, 8})), to_c(view(value_pages, {2, 4, 1, 8})), {}, {}};
  const qkv_tensor key_view = to_c(view(key, {2, 1, 8})), value_view = to_c(view(value, {2, 1, 8}));
  const qkv_tensor slot_view = to_c(view(slots));
  expect_ok(qkv_cache_write(&key_view, &value_view, &cache, &slot_view, nullptr));
  EXPECT_EQ(std::count(key_pages.begin(), key_pages.end(), 5.0F), 8);
  EXPECT_EQ(std::count(value_pages.begin(), value_pages.end(), 6.0F), 8);
  EXPECT_EQ(key_pages[6 * 8], 5.0F);
  EXPECT_EQ(value_pages[6 * 8 + 7], 6.0F);
}

TEST(c_api, shards_and_slots_are_those_of_cpp) {
  const std::vector<int32_t> starts = {0, 3, 4}, lengths = {34, 9}, table = {7, 2, 5, 1};
  Batch batch;
  batch.query_start_loc = view(starts);
  batch.seq_lens = view(lengths);
  batch.block_table = Tensor::contiguous(table.data(), DType::i32, {2, 2});
  const CBatch c_batch(batch);
  for (int32_t rank = 0; rank < 3; ++rank) {
    const qkv_shard shard = {rank, 3, 2};
    std::vector<int64_t> slots(4, -7);
    expect_ok(qkv_shard_slots(&c_batch.batch, 8, &shard, slots.data(), 4));
    EXPECT_EQ(slots, shard_slots(batch, 8, {rank, 3, 2}));
  }
  const qkv_shard everything = {};  // 0 ranks are 1
  std::vector<int64_t> slots(4, -7);
  expect_ok(qkv_shard_slots(&c_batch.batch, 32, &everything, slots.data(), 4));
  EXPECT_EQ(slots, shard_slots(batch, 32, {}));
  EXPECT_EQ(qkv_shard_slots(&c_batch.batch, 32, &everything, slots.data(), 3), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "num_slots");
}

TEST(c_api, a_layer_of_one_rank_is_that_of_cpp) {
  LayerSpec layer = testing::layer_of(2, 1, 8);
  layer.cache = CacheSpec{4};
  layer.shard = {2, 3, 4};
  layer.key_run = KeyRun::context;
  create(CSpec(layer).spec);
  layer.shard.rank = 3;
  const CSpec spec(layer);
  EXPECT_EQ(text_of([&](char* to, size_t capacity, size_t* needed) {
              return qkv_explain(&spec.spec, {QKV_CPU, 0}, to, capacity, needed);
            }),
            explain(layer).front());
}

TEST(c_api, mask_text_and_hash_are_those_of_cpp) {
  const char* text = "causal & window(127, 0)";
  const Mask mask = parse_mask(text);
  expect_ok(qkv_mask_check(text));
  uint64_t hash = 0;
  expect_ok(qkv_mask_hash(text, &hash));
  EXPECT_EQ(hash, mask.hash());
  EXPECT_EQ(
      text_of([&](char* to, size_t capacity, size_t* needed) { return qkv_mask_text(text, to, capacity, needed); }),
      mask.text());
}

TEST(c_api, makers_of_mask_operands) {
  const std::vector<int32_t> starts = {0, 3, 5}, lengths = {10, 2};
  const qkv_tensor query_start_loc = to_c(view(starts)), seq_lens = to_c(view(lengths));
  const qkv_prefix_lm_span spans[] = {{0, 6, 8}, {1, 0, 1}};
  std::vector<int32_t> first(5), second(5);
  expect_ok(qkv_fill_prefix_lm_spans(spans, 2, &query_start_loc, &seq_lens, first.data(), second.data(), 5));
  EXPECT_EQ(first, (std::vector<int32_t>{6, 6, -1, 0, 0}));
  EXPECT_EQ(second, (std::vector<int32_t>{8, 8, -1, 1, 1}));

  const std::vector<int32_t> parents = {-1, 0, 0, -1, 0};
  const TreeOperands expected = fill_tree(parents, view(starts));
  expect_ok(qkv_fill_tree(parents.data(), &query_start_loc, first.data(), second.data(), 5));
  EXPECT_EQ(first, expected.tree_enter);
  EXPECT_EQ(second, expected.tree_leave);

  EXPECT_EQ(qkv_fill_prefix_lm_spans(spans, 2, &query_start_loc, &seq_lens, first.data(), second.data(), 4),
            QKV_MISMATCH);
  EXPECT_STREQ(qkv_last_error_argument(), "num_tokens");
}

TEST(c_api, explain_says_what_cpp_says) {
  const auto reasons = [](const LayerSpec& layer) {
    const CSpec spec(layer);
    return text_of([&](char* text, size_t capacity, size_t* needed) {
      return qkv_explain(&spec.spec, {QKV_CPU, 0}, text, capacity, needed);
    });
  };
  LayerSpec layer = testing::layer_of(8, 2, 64);
  EXPECT_EQ(reasons(layer), "");
  layer.head_dim = 7;
  layer.softcap = -1;
  const std::vector<std::string> expected = explain(layer);
  ASSERT_EQ(expected.size(), 2U);
  EXPECT_EQ(reasons(layer), expected[0] + "\n" + expected[1]);
}

TEST(c_api, texts_about_the_library) {
  EXPECT_EQ(qkv_version(), version());
  EXPECT_EQ(text_of(qkv_info), info());
  EXPECT_EQ(text_of([](char* text, size_t capacity, size_t* needed) {
              return qkv_support_matrix(QKV_CPU, text, capacity, needed);
            }),
            support_matrix());
}

// Every index once, over four threads in an order of their own; counts what it ran.
void run_on_std_threads(void* context, int64_t n, qkv_body body, void* body_context) {
  *static_cast<int64_t*>(context) += n;
  std::vector<std::thread> threads;
  for (int64_t first = 0; first < 4; ++first) {
    threads.emplace_back([=] {
      for (int64_t i = n - 1 - first; i >= 0; i -= 4) body(body_context, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(c_api, the_hosts_threads_compute_the_same_bits) {
  const Case c = case_of(8, 2, 64, {3, 1}, {300, 40});
  Written expected(c), got(c);
  run_cpp(c, expected);
  int64_t num_bodies = 0;
  expect_ok(qkv_set_parallel_for(run_on_std_threads, &num_bodies));
  run_c(c, got);
  expect_ok(qkv_set_parallel_for(nullptr, nullptr));
  EXPECT_TRUE(expected.out.buffer() == got.out.buffer());
  EXPECT_GT(num_bodies, 1);

  const int64_t before = num_bodies;
  run_c(c, got);
  EXPECT_EQ(num_bodies, before);
}

TEST(c_api, number_of_threads_is_kept) {
  int32_t number = 0;
  expect_ok(qkv_set_num_threads(3));
  expect_ok(qkv_num_threads(&number));
  EXPECT_EQ(number, 3);
  expect_ok(qkv_set_num_threads(0));
}

TEST(c_api, prefix_groups_and_sharing_reach_the_plan) {
  auto c = testing::case_of(4, 1, 8, {1, 1}, {1200, 1300});
  c.prefix_groups = {{{0, 1}, 1100}};
  c.with_prefix_groups = true;
  c.prefix_sharing = PrefixSharing::always;
  const tools::CaseData data(c);
  const Plan expected = Attention(c.layer).plan(data.batch());
  const CBatch batch(data.batch());
  const auto plan = make_plan(create(CSpec(c.layer).spec), batch.batch);
  const std::string dump = text_of(
      [&](char* text, size_t capacity, size_t* needed) { return qkv_plan_dump(plan.get(), text, capacity, needed); });
  EXPECT_EQ(dump, expected.dump());
  EXPECT_NE(dump.find("2 requests from 0 on share 1100 keys"), std::string::npos) << dump;
}

}  // namespace
}  // namespace qkv
