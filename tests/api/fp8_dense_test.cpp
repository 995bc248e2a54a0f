// Dense keys and values of 8 bits: of every granularity and format, in every type of layer, and what is refused.
#include <cmath>

#include "qkv/ops.hpp"
#include "support/eight_bit_case.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_agrees;
using testing::expect_refused;
using testing::kGranularities;
using testing::view;

constexpr auto kInvalid = ErrorCode::invalid_argument;
constexpr auto kMismatch = ErrorCode::mismatch;

tools::Case dense_case(KvScales scales, DType dtype = DType::f8e4m3) {
  auto c = case_of(8, 4, 64, {1, 5, 70}, {40, 60, 90}, false);
  c.layer.kv_dtype = dtype;
  c.layer.kv_scales = scales;
  return c;
}

// A call over dense keys, and what it leaves.
struct Call {
  explicit Call(const tools::Case& of)
      : c(of),
        data(c),
        attention(c.layer),
        plan(attention.plan(data.batch())),
        keys{data.key.view(), data.value.view(), data.key_scale.view(), data.value_scale.view()},
        out(data.num_tokens * c.layer.num_q_heads * c.layer.value_dim(), 9.0F) {}

  Tensor out_view() const { return view(out, {data.num_tokens, c.layer.num_q_heads, c.layer.value_dim()}); }
  void forward() const {
    attention.forward(data.query.view(), keys.key, keys.value, plan, out_view(), {}, {}, {}, {}, keys.key_scale,
                      keys.value_scale);
  }

  tools::Case c;
  tools::CaseData data;
  Attention attention;
  Plan plan;
  KvCache keys;  // dense
  std::vector<float> out;
};

TEST(fp8_dense, every_granularity_format_and_feature) {
  for (const KvScales granularity : kGranularities) {
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
      auto c = dense_case(granularity, dtype);
      expect_agrees(c);
      c.layer.softcap = 20;
      c.layer.sinks.assign(8, 0.5F);
      c.layer.mask = mask::window(30, 0);
      c.layer.alibi_slopes.assign(8, 0.1F);
      expect_agrees(c);
      c.requests.push_back({2, 5000});  // splits
      c.layer.query_dtype = DType::bf16;
      c.layer.output_dtype = DType::f8e4m3;
      c.layer.head_dim_v = 24;
      expect_agrees(c);
    }
  }
}

TEST(fp8_dense, encoders_shards_and_runs_of_new_tokens) {
  for (const KvScales granularity : kGranularities) {
    for (const AttentionType type : {AttentionType::encoder_only, AttentionType::encoder}) {
      auto encoder = case_of(8, 4, 64, {1, 40, 70}, {1, 40, 70}, false);
      encoder.layer.type = type;
      encoder.layer.kv_dtype = encoder.layer.query_dtype = DType::f8e4m3;
      encoder.layer.kv_scales = encoder.query_scales = granularity;
      if (granularity == KvScales::per_token_head) encoder.query_scales = KvScales::per_head;
      expect_agrees(encoder);
    }
    auto shard = dense_case(granularity);
    shard.layer.shard = {1, 3, 8};
    shard.layer.key_run = KeyRun::context;
    expect_agrees(shard);
    auto new_tokens = dense_case(granularity);
    new_tokens.layer.key_run = KeyRun::new_tokens;
    expect_agrees(new_tokens);
  }
}

// The shape of the scales says what they belong to; the single call has the bits of the layer's.
TEST(fp8_dense, the_single_call_reads_the_granularity_from_the_shape) {
  for (const KvScales granularity : kGranularities) {
    Call call(dense_case(granularity));
    call.forward();
    const std::vector<float> of_layer = call.out;
    VarlenArguments arguments;
    arguments.query = call.data.query.view();
    arguments.key = call.keys.key;
    arguments.value = call.keys.value;
    arguments.key_scale = call.keys.key_scale;
    arguments.value_scale = call.keys.value_scale;
    const Batch batch = call.data.batch();
    arguments.query_start_loc = batch.query_start_loc;
    arguments.seq_lens = batch.seq_lens;
    arguments.mask = mask::causal();
    arguments.out = call.out_view();
    call.out.assign(call.out.size(), 9.0F);
    varlen_attention(arguments);
    EXPECT_EQ(call.out, of_layer) << to_string(granularity);
  }
}

TEST(fp8_dense, layers_that_do_not_fit_are_refused) {
  const auto refused = [](const char* argument, const std::function<void(LayerSpec&)>& change) {
    LayerSpec layer = dense_case(KvScales::per_head).layer;
    change(layer);
    expect_refused([&] { Attention{layer}; }, kInvalid, argument);
  };
  refused("kv_scales", [](LayerSpec& l) { l.kv_scales = KvScales::none; });
  refused("kv_scales", [](LayerSpec& l) { l.kv_dtype = DType::bf16; });
}

TEST(fp8_dense, scales_that_do_not_fit_are_refused_and_nothing_is_written) {
  const std::vector<float> of_heads = {0.1F, 0.2F, 0.3F, 0.4F};
  const auto refused = [&](KvScales granularity, ErrorCode code, const std::string& argument,
                           const std::function<void(KvCache&)>& change) {
    Call call(dense_case(granularity));
    change(call.keys);
    expect_refused([&] { call.forward(); }, code, argument);
    EXPECT_EQ(call.out, std::vector<float>(call.out.size(), 9.0F));
  };
  for (const KvScales granularity : kGranularities) {
    refused(granularity, kInvalid, "key_scale", [](KvCache& k) { k.key_scale = {}; });
    refused(granularity, kInvalid, "value_scale", [](KvCache& k) { k.value_scale = {}; });
    refused(granularity, kMismatch, "key_scale", [](KvCache& k) { k.key_scale.dtype = DType::bf16; });
  }
  refused(KvScales::per_head, kMismatch, "key_scale", [&](KvCache& k) { k.key_scale = view(of_heads, {2}); });
  refused(KvScales::per_token_head, kInvalid, "key_scale", [&](KvCache& k) { k.key_scale = view(of_heads, {1, 4}); });
  refused(KvScales::per_token_head, kMismatch, "value_scale",
          [](KvCache& k) { k.value_scale = k.value_scale.slice(0, 0, 7); });
  const std::vector<float> bad = {0.1F, 0.2F, NAN, 0.4F};
  refused(KvScales::per_head, kInvalid, "value_scale[2]", [&](KvCache& k) { k.value_scale = view(bad, {4}); });
  refused(KvScales::per_head, kMismatch, "key", [](KvCache& k) { k.key.dtype = DType::bf16; });
  // Scales for keys that have none.
  Call plain(case_of(8, 4, 64, {1, 5}, {40, 60}, false));
  plain.keys.key_scale = view(of_heads, {4});
  expect_refused([&] { plain.forward(); }, kMismatch, "key_scale");
}

TEST(fp8_dense, a_plan_carries_the_scales_that_it_was_made_for) {
  Call call(dense_case(KvScales::per_head));
  LayerSpec other = call.c.layer;
  other.kv_scales = KvScales::per_tensor;
  const Attention attention(other);
  expect_refused(
      [&] {
        attention.forward(call.data.query.view(), call.keys.key, call.keys.value, call.plan, call.out_view(), {}, {},
                          {}, {}, call.keys.key_scale, call.keys.value_scale);
      },
      kMismatch, "plan");
}

}  // namespace
}  // namespace qkv
