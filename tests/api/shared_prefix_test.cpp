// Shared prefixes through the public interface: right, with every feature, and without changing a bit.
#include <algorithm>
#include <cstring>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::expect_agrees;
using testing::with;

// Decode steps of several lengths that share 1600 keys, three splits of 512 and a bit, behind one that shares nothing.
tools::Case decode_batch() {
  auto c = case_of(4, 1, 24, {1, 1, 1, 1, 2, 1}, {700, 1700, 1601, 2300, 1900, 1650});
  c.prefix_groups = {{{1, 2, 3, 4, 5}, 1600}};
  c.prefix_sharing = PrefixSharing::always;
  return c;
}

int64_t num_shared_items(const tools::Case& c) {
  const tools::CaseData data(c);
  const PlanReport report = Attention(c.layer).plan(data.batch()).report();
  return std::count_if(report.items.begin(), report.items.end(),
                       [](const PlanItem& item) { return item.requests.size() > 1; });
}

// Each request alone has the same bits: expect_agrees compares them.
void expect_shares_and_agrees(const tools::Case& c) {
  EXPECT_GT(num_shared_items(c), 0) << tools::describe(c);
  expect_agrees(c);
}

TEST(shared_prefix, decode_steps_agree_with_the_definition_and_with_themselves_alone) {
  expect_shares_and_agrees(decode_batch());
  auto given = decode_batch();
  given.with_prefix_groups = true;
  expect_shares_and_agrees(given);
}

TEST(shared_prefix, goes_with_every_term_of_the_score) {
  const std::vector<std::function<void(LayerSpec&)>> changes = {
      [](LayerSpec& layer) { layer.softcap = 5; },
      [](LayerSpec& layer) {
        layer.sinks = {0.5F, -INFINITY, 2, -1};
      },
      [](LayerSpec& layer) {
        layer.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
      },
      [](LayerSpec& layer) { layer.alibi_per_request = true; },
      [](LayerSpec& layer) { layer.query_dtype = layer.kv_dtype = DType::bf16; },
      [](LayerSpec& layer) { layer.kv_dtype = DType::f16; },
      [](LayerSpec& layer) { layer.head_dim_v = 40; },
  };
  for (const auto& change : changes) expect_shares_and_agrees(with(decode_batch(), change));
}

TEST(shared_prefix, goes_with_masks) {
  for (const char* mask : {"causal & window(900, 0)", "per_request_causal", "causal & kv_pos + q_head != 77",
                           "rswa(700)", "causal & ~(kv_pos == 100)", "document"}) {
    expect_shares_and_agrees(with(decode_batch(), [&](LayerSpec& layer) { layer.mask = parse_mask(mask); }));
  }
}

TEST(shared_prefix, caches_of_8_bits_share_unless_requests_have_scales_of_their_own) {
  for (const KvScales scales : {KvScales::per_tensor, KvScales::per_head, KvScales::per_token_head}) {
    for (const DType dtype : {DType::f8e4m3, DType::i8}) {
      expect_shares_and_agrees(with(decode_batch(), [&](LayerSpec& layer) {
        layer.kv_dtype = dtype;
        layer.kv_scales = scales;
      }));
    }
  }
  const auto own = with(decode_batch(), [](LayerSpec& layer) {
    layer.kv_dtype = DType::f8e4m3;
    layer.kv_scales = KvScales::per_request_head;
  });
  EXPECT_EQ(num_shared_items(own), 0);
  expect_agrees(own);
}

TEST(shared_prefix, nested_groups_agree) {
  auto c = case_of(4, 1, 16, {1, 1, 1, 1, 1}, {2200, 2100, 2050, 2300, 1100});
  c.prefix_groups = {{{0, 1, 2, 3, 4}, 1024}, {{0, 1, 3}, 1536}, {{0, 3}, 2048}};
  c.prefix_sharing = PrefixSharing::always;
  expect_shares_and_agrees(c);
}

// casebook 23, in a smaller layer: cascade answered wrong with suffixes of 1 to 300 keys and queries of 1 and 17
// tokens.
TEST(shared_prefix, suffixes_of_all_lengths_behind_a_prefix_of_4096_keys) {
  std::vector<int32_t> q;
  std::vector<int32_t> kv;
  std::vector<int32_t> all;
  for (int32_t r = 0; r < 16; ++r) {
    q.push_back(r % 3 == 2 ? 17 : 1);
    kv.push_back(4096 + q.back() + (r * 20) % 284);
    all.push_back(r);
  }
  auto c = case_of(8, 2, 16, q, kv);
  c.prefix_groups = {{all, 4096}};
  c.prefix_sharing = PrefixSharing::always;
  expect_shares_and_agrees(c);
}

// casebook 80: the promise holds by whatever way the keys are read.
TEST(shared_prefix, no_way_of_sharing_changes_a_bit) {
  std::vector<std::vector<std::byte>> outputs;
  for (const PrefixSharing sharing : {PrefixSharing::off, PrefixSharing::automatic, PrefixSharing::always}) {
    auto c = with(decode_batch(), [](LayerSpec& layer) { layer.sinks.assign(4, 0.5F); });
    c.prefix_sharing = sharing;
    tools::CaseData data(c);
    const Attention attention(c.layer);
    const Plan plan = attention.plan(data.batch());
    attention.update_cache(data.key.view(), data.value.view(), data.cache(), plan);
    std::vector<float> out(static_cast<size_t>(data.num_tokens) * 4 * 24);
    std::vector<float> lse(static_cast<size_t>(data.num_tokens) * 4);
    attention.forward(data.query.view(), data.cache(), plan, testing::view(out, {data.num_tokens, 4, 24}),
                      testing::view(lse, {4, data.num_tokens}));
    std::vector<std::byte>& bits = outputs.emplace_back((out.size() + lse.size()) * sizeof(float));
    std::memcpy(bits.data(), out.data(), out.size() * sizeof(float));
    std::memcpy(bits.data() + out.size() * sizeof(float), lse.data(), lse.size() * sizeof(float));
  }
  EXPECT_EQ(outputs[1], outputs[0]);
  EXPECT_EQ(outputs[2], outputs[0]);
}

TEST(shared_prefix, with_leave_to_change_bits_joined_rows_run_the_many_rows_kernel_and_agree) {
  std::vector<int32_t> all = {0, 1, 2, 3, 4, 5, 6, 7, 8};
  auto c = case_of(4, 1, 24, std::vector<int32_t>(9, 1), std::vector<int32_t>(9, 1200));
  c.prefix_groups = {{all, 1100}};
  c.prefix_sharing = PrefixSharing::always;
  const auto runs_many_rows = [&] {
    const tools::CaseData data(c);
    const PlanReport report = Attention(c.layer).plan(data.batch()).report();
    return std::any_of(report.items.begin(), report.items.end(), [](const PlanItem& item) { return !item.few_rows; });
  };
  EXPECT_FALSE(runs_many_rows());
  c.prefix_sharing_keeps_bits = false;
  EXPECT_TRUE(runs_many_rows());
  expect_agrees(c);
}

TEST(shared_prefix, automatic_shares_a_long_prefix_of_many_and_shows_both_predictions) {
  std::vector<int32_t> all(32);
  for (int32_t r = 0; r < 32; ++r) all[r] = r;
  auto c = case_of(8, 1, 16, std::vector<int32_t>(32, 1), std::vector<int32_t>(32, 4200));
  c.prefix_groups = {{all, 4096}};
  EXPECT_GT(num_shared_items(c), 0);
  const tools::CaseData data(c);
  const Plan plan = Attention(c.layer).plan(data.batch());
  EXPECT_LT(plan.report().seconds, plan.report().seconds_without_sharing);
  EXPECT_NE(plan.dump().find("without sharing"), std::string::npos);
  EXPECT_NE(plan.dump().find("32 requests from 0 on share 4096 keys"), std::string::npos);
}

}  // namespace
}  // namespace qkv
