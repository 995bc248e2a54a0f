// Bad input is refused before anything runs or is written: the argument, its value, what is allowed.
#include <cmath>
#include <limits>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using testing::layer_of;
using testing::view;

constexpr auto kInvalid = ErrorCode::invalid_argument;
constexpr auto kMismatch = ErrorCode::mismatch;

// --- layers ---

TEST(refusals, layers_that_make_no_sense) {
  const auto refused = [](const char* argument, const std::function<void(LayerSpec&)>& change) {
    LayerSpec layer = layer_of(8, 2, 64);
    change(layer);
    EXPECT_FALSE(explain(layer).empty());
    expect_refused([&] { Attention{layer}; }, kInvalid, argument);
  };
  refused("num_q_heads", [](LayerSpec& l) { l.num_q_heads = 0; });
  refused("num_kv_heads", [](LayerSpec& l) { l.num_kv_heads = 0; });
  refused("num_kv_heads", [](LayerSpec& l) { l.num_kv_heads = 3; });
  refused("num_kv_heads", [](LayerSpec& l) { l.num_kv_heads = 16; });
  refused("head_dim", [](LayerSpec& l) { l.head_dim = 7; });
  refused("head_dim", [](LayerSpec& l) { l.head_dim = 513; });
  refused("head_dim_v", [](LayerSpec& l) { l.head_dim_v = 4; });
  refused("head_dim_v", [](LayerSpec& l) { l.head_dim_v = -64; });
  refused("query_dtype", [](LayerSpec& l) { l.query_dtype = DType::i32; });
  refused("output_dtype", [](LayerSpec& l) { l.output_dtype = DType::i64; });
  refused("scale", [](LayerSpec& l) { l.scale = NAN; });
  refused("scale", [](LayerSpec& l) { l.scale = INFINITY; });
  refused("softcap", [](LayerSpec& l) { l.softcap = -1; });
  refused("softcap", [](LayerSpec& l) { l.softcap = NAN; });
  refused("alibi_slopes", [](LayerSpec& l) { l.alibi_slopes = {1, 2}; });
  refused("alibi_slopes[3]", [](LayerSpec& l) { l.alibi_slopes = {1, 1, 1, NAN, 1, 1, 1, 1}; });
  refused("alibi_slopes", [](LayerSpec& l) {
    l.alibi_slopes.assign(8, 1);
    l.alibi_per_request = true;
  });
  refused("sinks", [](LayerSpec& l) { l.sinks = {1}; });
  refused("sinks[0]", [](LayerSpec& l) { l.sinks.assign(8, INFINITY); });
  refused("cache", [](LayerSpec& l) {
    l.type = AttentionType::encoder_only;
    l.cache = CacheSpec{16};
  });
}

// --- batches: one good one, and what each change does to it ---

struct GoodBatch {
  std::vector<int32_t> query_start_loc = {0, 3, 4};
  std::vector<int32_t> seq_lens = {20, 33};
  std::vector<int32_t> block_table = {0, 1, -1, 2, 3, 4};
  std::vector<int64_t> slot_mapping = {17, 18, 19, 96 - 32 + 0};
  std::vector<int32_t> causal = {1, 0};
  std::vector<MaskOperand> operands;

  Batch batch() const {
    Batch batch;
    batch.query_start_loc = view(query_start_loc);
    batch.seq_lens = view(seq_lens);
    batch.block_table = Tensor::contiguous(block_table.data(), DType::i32, {2, 3});
    batch.slot_mapping = view(slot_mapping);
    batch.mask_operands = {{"causal", view(causal)}};
    return batch;
  }
};

LayerSpec good_layer() {
  LayerSpec layer = layer_of(4, 2, 8);
  layer.cache = CacheSpec{16};
  layer.mask = mask::per_request_causal();
  return layer;
}

void expect_batch_refused(ErrorCode code, const std::string& argument, const std::function<void(GoodBatch&)>& change) {
  GoodBatch good;
  change(good);
  expect_refused([&] { Attention(good_layer()).plan(good.batch()); }, code, argument);
}

void expect_tensor_refused(ErrorCode code, const std::string& argument, const std::function<void(Batch&)>& change) {
  const GoodBatch good;
  Batch batch = good.batch();
  change(batch);
  expect_refused([&] { Attention(good_layer()).plan(batch); }, code, argument);
}

TEST(refusals, the_good_batch_is_good) { Attention(good_layer()).plan(GoodBatch().batch()); }

TEST(refusals, values_of_a_batch) {
  expect_batch_refused(kInvalid, "query_start_loc[0]", [](GoodBatch& b) { b.query_start_loc[0] = 1; });
  expect_batch_refused(kInvalid, "query_start_loc[2]", [](GoodBatch& b) { b.query_start_loc[2] = 2; });
  expect_batch_refused(kInvalid, "seq_lens[1]", [](GoodBatch& b) { b.seq_lens[1] = -1; });
  expect_batch_refused(kInvalid, "seq_lens[1]", [](GoodBatch& b) { b.seq_lens[1] = 49; });  // past the table
  expect_batch_refused(kInvalid, "block_table[0, 1]", [](GoodBatch& b) { b.block_table[1] = -1; });
  expect_batch_refused(kInvalid, "slot_mapping", [](GoodBatch& b) { b.slot_mapping[1] = 17; });
  expect_batch_refused(kInvalid, "slot_mapping[2]", [](GoodBatch& b) { b.slot_mapping[2] = -2; });
}

TEST(refusals, tensors_of_a_batch) {
  static const std::vector<int64_t> wide = {0, 3, 4};
  static const std::vector<float> floats = {0, 3, 4, 0, 0, 0};
  static const std::vector<int32_t> three = {1, 0, 1};
  expect_tensor_refused(kInvalid, "query_start_loc", [](Batch& b) { b.query_start_loc = {}; });
  expect_tensor_refused(kMismatch, "query_start_loc", [](Batch& b) { b.query_start_loc = view(wide); });
  expect_tensor_refused(kInvalid, "seq_lens", [](Batch& b) { b.seq_lens = {}; });
  expect_tensor_refused(kMismatch, "seq_lens", [](Batch& b) { b.seq_lens = view(three); });
  expect_tensor_refused(kInvalid, "block_table", [](Batch& b) { b.block_table = {}; });
  expect_tensor_refused(kInvalid, "block_table", [](Batch& b) { b.block_table = view(three); });
  expect_tensor_refused(kMismatch, "block_table", [](Batch& b) { b.block_table = view(floats, {2, 3}); });
  expect_tensor_refused(kMismatch, "slot_mapping", [](Batch& b) { b.slot_mapping = view(three); });
  expect_tensor_refused(kInvalid, "mask_operands[causal]", [](Batch& b) { b.mask_operands.clear(); });
  expect_tensor_refused(kMismatch, "mask_operands[causal]", [](Batch& b) { b.mask_operands[0].values = view(three); });
  expect_tensor_refused(kMismatch, "mask_operands[causal]",
                        [](Batch& b) { b.mask_operands[0].values = view(floats, {2}); });
  expect_tensor_refused(kInvalid, "mask_operands[causal]",
                        [](Batch& b) { b.mask_operands.push_back(b.mask_operands[0]); });
  expect_tensor_refused(kMismatch, "alibi_slopes", [](Batch& b) { b.alibi_slopes = view(floats, {2, 3}); });
  expect_tensor_refused(kMismatch, "query_start_loc", [](Batch& b) {
    b.query_start_loc.device = {DeviceKind::cuda, 0};
  });
}

TEST(refusals, what_a_batch_need_not_own_is_ignored) {
  GoodBatch good;
  good.block_table[2] = std::numeric_limits<int32_t>::max();  // beyond the 20 tokens of request 0
  good.slot_mapping = {-1, -1, 19, -1};
  Batch batch = good.batch();
  batch.mask_operands.push_back({"of_another_layer", Tensor{}});
  Attention(good_layer()).plan(batch);
}

TEST(refusals, an_encoders_keys_are_its_new_tokens) {
  LayerSpec layer = layer_of(2, 2, 8);
  layer.type = AttentionType::encoder_only;
  const std::vector<int32_t> starts = {0, 3};
  const std::vector<int32_t> lengths = {4};
  Batch batch;
  batch.query_start_loc = view(starts);
  Attention(layer).plan(batch);
  batch.seq_lens = view(lengths);
  expect_refused([&] { Attention(layer).plan(batch); }, kMismatch, "seq_lens[0]");
}

TEST(refusals, slots_and_tables_without_a_cache) {
  LayerSpec layer = layer_of(4, 2, 8);
  layer.mask = mask::per_request_causal();
  const GoodBatch good;
  Batch batch = good.batch();
  expect_refused([&] { Attention(layer).plan(batch); }, kMismatch, "block_table");
  batch.block_table = {};
  expect_refused([&] { Attention(layer).plan(batch); }, kMismatch, "slot_mapping");
}

// --- calls ---

struct GoodCall {
  GoodCall() : attention(good_layer()), plan(attention.plan(good.batch())) {}

  KvCache cache() const { return KvCache::from_interleaved(view(pages, {5, 2, 16, 16}), 8); }
  Tensor query_view() const { return view(query, {4, 4, 8}); }
  Tensor out_view() const { return view(out, {4, 4, 8}); }
  Tensor lse_view() const { return view(lse, {4, 4}); }

  GoodBatch good;
  Attention attention;
  Plan plan;
  std::vector<float> pages = std::vector<float>(5 * 2 * 16 * 16, 1.0F);
  std::vector<float> query = std::vector<float>(4 * 4 * 8, 1.0F);
  std::vector<float> out = std::vector<float>(4 * 4 * 8, 9.0F);
  std::vector<float> lse = std::vector<float>(4 * 4, 9.0F);
};

struct ForwardArguments {
  Tensor query;
  KvCache cache;
  Tensor out;
  Tensor lse;
};

void expect_forward_refused(ErrorCode code, const std::string& argument,
                            const std::function<void(ForwardArguments&)>& change) {
  GoodCall call;
  ForwardArguments a{call.query_view(), call.cache(), call.out_view(), call.lse_view()};
  change(a);
  expect_refused([&] { call.attention.forward(a.query, a.cache, call.plan, a.out, a.lse); }, code, argument);
  EXPECT_EQ(call.out, std::vector<float>(call.out.size(), 9.0F)) << "out was written";
  EXPECT_EQ(call.lse, std::vector<float>(call.lse.size(), 9.0F)) << "lse was written";
}

TEST(refusals, the_good_call_is_good) {
  GoodCall call;
  call.attention.forward(call.query_view(), call.cache(), call.plan, call.out_view(), call.lse_view());
  EXPECT_NEAR(call.out[0], 1.0F, 1e-6);
}

TEST(refusals, tensors_of_forward) {
  using A = ForwardArguments;
  expect_forward_refused(kInvalid, "query", [](A& a) { a.query = {}; });
  expect_forward_refused(kInvalid, "query", [](A& a) { a.query.rank = 2; });
  expect_forward_refused(kInvalid, "query", [](A& a) { a.query.data = nullptr; });
  expect_forward_refused(kInvalid, "query", [](A& a) { a.query.stride[2] = 2; });
  expect_forward_refused(kMismatch, "query", [](A& a) { a.query = a.query.slice(0, 0, 3); });
  expect_forward_refused(kMismatch, "query", [](A& a) { a.query = a.query.slice(1, 0, 2); });
  expect_forward_refused(kMismatch, "query", [](A& a) { a.query.dtype = DType::bf16; });
  expect_forward_refused(kMismatch, "query", [](A& a) { a.query.device.kind = DeviceKind::cuda; });
  expect_forward_refused(kInvalid, "out", [](A& a) { a.out.stride[0] = 0; });
  expect_forward_refused(kMismatch, "out", [](A& a) { a.out = a.out.slice(2, 0, 4); });
  expect_forward_refused(kMismatch, "lse", [](A& a) { a.lse = a.lse.slice(1, 0, 3); });
  expect_forward_refused(kInvalid, "lse", [](A& a) { a.lse.stride[0] = 0; });
  expect_forward_refused(kMismatch, "lse", [](A& a) { a.lse.dtype = DType::i32; });
}

TEST(refusals, caches_that_do_not_fit) {
  using A = ForwardArguments;
  expect_forward_refused(kInvalid, "cache.key", [](A& a) { a.cache.key = {}; });
  expect_forward_refused(kMismatch, "cache.key", [](A& a) { a.cache.key.dtype = DType::f16; });
  expect_forward_refused(kMismatch, "cache.key", [](A& a) { a.cache.key = a.cache.key.slice(3, 0, 4); });
  expect_forward_refused(kMismatch, "cache.key", [](A& a) { a.cache.key = a.cache.key.slice(2, 0, 1); });
  expect_forward_refused(kMismatch, "cache.key", [](A& a) { a.cache.key = a.cache.key.slice(1, 0, 8); });
  expect_forward_refused(kMismatch, "cache.value", [](A& a) { a.cache.value = a.cache.value.slice(0, 0, 4); });
  expect_forward_refused(kMismatch, "cache.value", [](A& a) { a.cache.value = a.cache.value.slice(3, 0, 2); });
  // The table names page 4: a cache of four pages ends before it.
  expect_forward_refused(kMismatch, "block_table", [](A& a) {
    a.cache.key = a.cache.key.slice(0, 0, 4);
    a.cache.value = a.cache.value.slice(0, 0, 4);
  });
}

TEST(refusals, dense_keys_that_do_not_fit) {
  LayerSpec layer = layer_of(2, 1, 8);
  const std::vector<int32_t> starts = {0, 2};
  const std::vector<int32_t> lengths = {5};
  Batch batch;
  batch.query_start_loc = view(starts);
  batch.seq_lens = view(lengths);
  const Attention attention(layer);
  const Plan plan = attention.plan(batch);
  const std::vector<float> query(2 * 2 * 8);
  const std::vector<float> keys(5 * 8);
  const std::vector<float> out(2 * 2 * 8);
  const Tensor good = view(keys, {5, 1, 8});
  const auto forward = [&](const Tensor& key, const Tensor& value) {
    attention.forward(view(query, {2, 2, 8}), key, value, plan, view(out, {2, 2, 8}));
  };
  forward(good, good);
  expect_refused([&] { forward(good.slice(0, 0, 4), good); }, kMismatch, "key");
  expect_refused([&] { forward(good, good.slice(2, 0, 4)); }, kMismatch, "value");
  expect_refused([&] { forward(good, {}); }, kInvalid, "value");
  expect_refused(
      [&] {
        attention.forward(view(query, {2, 2, 8}), KvCache{good, good}, plan, view(out, {2, 2, 8}));
      },
      kMismatch, "cache");
}

TEST(refusals, updates_that_do_not_fit) {
  GoodCall call;
  const std::vector<float> before = call.pages;
  const std::vector<float> tokens(4 * 2 * 8, 5.0F);
  const Tensor good = view(tokens, {4, 2, 8});
  const auto refused = [&](ErrorCode code, const char* argument, const Tensor& key, const Tensor& value,
                           const KvCache& cache, const Plan& plan) {
    expect_refused([&] { call.attention.update_cache(key, value, cache, plan); }, code, argument);
    EXPECT_EQ(call.pages, before);
  };
  refused(kMismatch, "key", good.slice(0, 0, 3), good, call.cache(), call.plan);
  refused(kMismatch, "value", good, good.slice(2, 0, 4), call.cache(), call.plan);
  refused(kMismatch, "key", good.slice(1, 0, 1), good, call.cache(), call.plan);
  KvCache overlapping = call.cache();
  overlapping.key.stride[0] = 0;
  refused(kInvalid, "cache.key", good, good, overlapping, call.plan);
  GoodBatch past_the_end;
  past_the_end.slot_mapping[3] = 5 * 16;
  refused(kMismatch, "slot_mapping", good, good, call.cache(), call.attention.plan(past_the_end.batch()));
  Batch without_slots = call.good.batch();
  without_slots.slot_mapping = {};
  refused(kInvalid, "slot_mapping", good, good, call.cache(), call.attention.plan(without_slots));
}

TEST(refusals, a_plan_of_another_kind_of_layer) {
  GoodCall call;
  const auto refused = [&](const std::function<void(LayerSpec&)>& change) {
    LayerSpec other = good_layer();
    change(other);
    const Attention attention(other);
    expect_refused(
        [&] { attention.forward(call.query_view(), call.cache(), call.plan, call.out_view(), call.lse_view()); },
        kMismatch, "plan");
  };
  refused([](LayerSpec& l) { l.kv_dtype = DType::bf16; });
  refused([](LayerSpec& l) { l.num_kv_heads = 4; });
  refused([](LayerSpec& l) { l.head_dim = 16; });
  refused([](LayerSpec& l) { l.cache = CacheSpec{32}; });
  refused([](LayerSpec& l) { l.mask = mask::causal(); });
  refused([](LayerSpec& l) { l.type = AttentionType::encoder_decoder; });
  // Numbers of the score terms are the layer's own: one plan serves layers that differ in them.
  LayerSpec other = good_layer();
  other.scale = 0.5F;
  other.softcap = 10;
  other.sinks.assign(4, 1.0F);
  Attention(other).forward(call.query_view(), call.cache(), call.plan, call.out_view(), call.lse_view());
}

TEST(refusals, varlen_and_merge_arguments) {
  const std::vector<float> data(64);
  const std::vector<int32_t> starts = {0, 2};
  const std::vector<int32_t> lengths = {2};
  VarlenArguments good;
  good.query = view(data, {2, 2, 8});
  good.key = view(data, {2, 1, 8});
  good.value = view(data, {2, 1, 8});
  good.query_start_loc = view(starts);
  good.seq_lens = view(lengths);
  good.out = view(data, {2, 2, 8});
  varlen_attention(good);
  const auto refused = [&](ErrorCode code, const char* argument, const std::function<void(VarlenArguments&)>& change) {
    VarlenArguments arguments = good;
    change(arguments);
    expect_refused([&] { varlen_attention(arguments); }, code, argument);
  };
  refused(kInvalid, "query", [](VarlenArguments& a) { a.query = {}; });
  refused(kInvalid, "key", [](VarlenArguments& a) { a.key.rank = 2; });
  refused(kInvalid, "key", [&](VarlenArguments& a) { a.block_table = view(starts); });
  refused(kInvalid, "out", [](VarlenArguments& a) { a.out = {}; });
  refused(kMismatch, "value", [](VarlenArguments& a) { a.value.dtype = DType::bf16; });
  refused(kInvalid, "sinks", [&](VarlenArguments& a) { a.sinks = view(data, {3}); });
  refused(kInvalid, "alibi_slopes", [&](VarlenArguments& a) { a.alibi_slopes = view(data, {5}); });
  refused(kMismatch, "alibi_slopes", [&](VarlenArguments& a) { a.alibi_slopes = view(data, {2, 2}); });

  const Tensor rows = view(data, {2, 2, 8});
  const Tensor lse = view(data, {2, 2});
  expect_refused([&] { merge_states({}, rows, lse); }, kInvalid, "states");
  expect_refused(
      [&] {
        merge_states({{rows, lse}, {rows.slice(0, 0, 1), lse}}, rows, lse);
      },
      kMismatch, "states[1].out");
  expect_refused([&] { merge_states({{rows, {}}}, rows, lse); }, kInvalid, "states[0].lse");
  expect_refused([&] { merge_states({{rows, lse}}, rows, lse.slice(1, 0, 1)); }, kMismatch, "lse");
}

// Tensors that say where they lie are believed: none is read here.
TEST(refusals, tensors_of_mixed_devices_and_odd_addresses) {
  std::vector<float> data(512, 0.5F);
  const auto on_gpu = [](Tensor tensor) {
    tensor.device = {DeviceKind::cuda, 1};
    return tensor;
  };
  const Tensor rows = view(data, {2, 2, 8});
  const Tensor lse = view(data, {2, 2});
  expect_refused([&] { merge_states({{rows, lse}, {on_gpu(rows), lse}}, rows, lse); }, kMismatch, "states[1].out");
  expect_refused([&] { merge_states({{rows, on_gpu(lse)}}, rows, lse); }, kMismatch, "states[0].lse");
  expect_refused([&] { merge_states({{rows, lse}}, rows, on_gpu(lse)); }, kMismatch, "lse");
  Tensor odd = lse;
  odd.data = static_cast<std::byte*>(odd.data) + 2;
  expect_refused([&] { merge_states({{rows, lse}}, rows, odd); }, kInvalid, "lse");

  static const std::vector<int32_t> starts = {0, 2}, lengths = {2};
  VarlenArguments good;
  good.query = good.out = good.key = good.value = view(data, {2, 2, 8});
  good.query_start_loc = view(starts);
  good.seq_lens = view(lengths);
  const auto refused = [&](const char* argument, const std::function<void(VarlenArguments&)>& change) {
    VarlenArguments arguments = good;
    change(arguments);
    expect_refused([&] { varlen_attention(arguments); }, kMismatch, argument);
  };
  refused("key", [&](VarlenArguments& a) { a.key = on_gpu(a.key); });
  refused("value", [&](VarlenArguments& a) { a.value = on_gpu(a.value); });
  refused("out", [&](VarlenArguments& a) { a.out = on_gpu(a.out); });
  refused("lse", [&](VarlenArguments& a) { a.lse = on_gpu(lse); });
  refused("query_start_loc", [&](VarlenArguments& a) { a.query_start_loc = on_gpu(a.query_start_loc); });
}

TEST(refusals, settings_of_threads) {
  expect_refused([] { set_num_threads(-1); }, kInvalid, "num_threads");
}

}  // namespace
}  // namespace qkv
