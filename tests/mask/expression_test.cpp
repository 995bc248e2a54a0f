// Canonical text, hash, operands, and the limits that every expression is held to.
#include "scene_of.hpp"

namespace qkv::test {
namespace {

using mask::kv_pos;
using mask::operand;
using mask::q_head;
using mask::q_pos;

TEST(Expression, text_shows_the_expanded_definition) {
  EXPECT_EQ(mask::causal().text(), "kv_pos <= q_pos");
  EXPECT_EQ(mask::window(3, 0).text(), "q_pos - kv_pos <= 3 & kv_pos - q_pos <= 0");
  EXPECT_EQ(mask::rswa(64).text(), "kv_pos <= q_pos & (kv_pos < prefix_len[request] | q_pos - kv_pos < 64)");
  EXPECT_EQ(mask::prefix_lm().text(), "kv_pos <= q_pos | span_start[query] <= kv_pos & kv_pos <= span_end[query]");
  EXPECT_EQ(mask::per_request_causal().text(), "causal[request] == 0 | kv_pos <= q_pos");
  EXPECT_EQ(mask::document().text(), "query_document[query] == key_document[key]");
  EXPECT_EQ(mask::tree().text(),
            "kv_pos < kv_len - q_len | tree_enter[new_key] <= tree_enter[query] & tree_enter[query] < "
            "tree_leave[new_key]");
  EXPECT_EQ((q_pos() - 3).text(), "q_pos - 3");
}

TEST(Expression, parentheses_stand_only_where_the_tree_needs_them) {
  const Mask a = q_pos() < 1;
  const Mask b = kv_pos() == 2;
  const Mask c = q_head() <= 3;
  EXPECT_EQ((a & b & c).text(), "q_pos < 1 & kv_pos == 2 & q_head <= 3");
  EXPECT_EQ((a & (b & c)).text(), "q_pos < 1 & (kv_pos == 2 & q_head <= 3)");
  EXPECT_EQ(((a & b) | c).text(), "q_pos < 1 & kv_pos == 2 | q_head <= 3");
  EXPECT_EQ((a & (b | c)).text(), "q_pos < 1 & (kv_pos == 2 | q_head <= 3)");
  EXPECT_EQ((~a & b).text(), "~q_pos < 1 & kv_pos == 2");
  EXPECT_EQ((~(a & b)).text(), "~(q_pos < 1 & kv_pos == 2)");
  EXPECT_EQ((~b).text(), "kv_pos != 2");
  EXPECT_EQ((~~b).text(), "~kv_pos != 2");
  EXPECT_EQ((q_pos() - (kv_pos() - 1) < q_pos() - kv_pos() + -1).text(), "q_pos - (kv_pos - 1) < q_pos - kv_pos + -1");
}

TEST(Expression, greater_is_kept_as_less) {
  EXPECT_EQ((q_pos() > 1).text(), "1 < q_pos");
  EXPECT_EQ((q_pos() >= kv_pos()).text(), "kv_pos <= q_pos");
  EXPECT_EQ((q_pos() != kv_pos()).text(), "q_pos != kv_pos");
}

TEST(Expression, hash_is_stable) {
  EXPECT_EQ(Mask().hash(), 0xd7c9b97948142e4au);
  EXPECT_EQ(mask::causal().hash(), 0x39a0ac0db17a1930u);
  EXPECT_NE(mask::window(3, 0).hash(), mask::window(4, 0).hash());
}

TEST(Expression, operands_come_in_order_of_name) {
  const std::vector<OperandDeclaration> tree{{"tree_enter", OperandScope::query}, {"tree_leave", OperandScope::query}};
  EXPECT_EQ(operands_of(mask::tree()), tree);
  const std::vector<OperandDeclaration> both{{"key_document", OperandScope::key},
                                             {"prefix_len", OperandScope::request},
                                             {"query_document", OperandScope::query}};
  EXPECT_EQ(operands_of(mask::rswa(4) & mask::document()), both);
  EXPECT_TRUE(operands_of(mask::causal()).empty());
}

TEST(Expression, one_name_has_one_shape) {
  const MaskValue query = operand("a", OperandScope::query);
  EXPECT_EQ(operands_of(query <= operand("a", OperandScope::new_key)).size(), 1u);
  expect_refused([&] { (void)(query <= operand("a", OperandScope::key)); },
                 "operand a used both as [query] or [new_key] and as [key]");
  expect_refused([&] { (void)((query <= 1) & (operand("a", OperandScope::request) == 0)); }, "one array shape a name");
  expect_refused([&] { (void)((operand("a", OperandScope::key) <= 1) | (operand("a", OperandScope::request) == 0)); },
                 "one array shape a name");
}

TEST(Expression, operand_names_are_identifiers) {
  for (const char* name : {"", "1a", "a b", "a-b", "q_pos", "true", "ä"}) {
    expect_refused([&] { operand(name, OperandScope::key); }, "operand name");
  }
  EXPECT_EQ((operand("causal", OperandScope::request) == 1).text(), "causal[request] == 1");
  EXPECT_EQ((operand("_a1", OperandScope::key) == 1).text(), "_a1[key] == 1");
}

TEST(Expression, sums_that_could_overflow_are_refused) {
  constexpr int64_t kLimit = int64_t{1} << 60;
  EXPECT_EQ(MaskValue(kLimit).text(), "1152921504606846976");
  EXPECT_EQ(MaskValue(-kLimit).text(), "-1152921504606846976");
  expect_refused([] { MaskValue value(kLimit + 1); }, "constants from -2^60 to 2^60");
  expect_refused([] { MaskValue value(INT64_MIN); }, "constants from -2^60 to 2^60");
  expect_refused([] { (void)(q_pos() + kLimit); }, "sums that stay within 2^60");
  expect_refused(
      [] {
        MaskValue doubled = q_pos();
        for (int32_t i = 0; i < 64; ++i) doubled = doubled + doubled;
      },
      "allowed: ");
}

TEST(Expression, shared_subtrees_cannot_grow_without_bound) {
  expect_refused(
      [] {
        Mask doubled = mask::causal();
        for (int32_t i = 0; i < 64; ++i) doubled = doubled & doubled;
      },
      "at most 10000");
}

TEST(Expression, deep_trees_are_refused) {
  const auto chain = [](int32_t length) {
    Mask mask = mask::causal();
    for (int32_t i = 1; i < length; ++i) mask = mask | (kv_pos() == i);
    return mask;
  };
  const Mask deepest = chain(255);
  EXPECT_EQ(parse_mask(deepest.text()).text(), deepest.text());
  expect_refused([&] { chain(256); }, "operations nested 257 deep; allowed: at most 256");
}

}  // namespace
}  // namespace qkv::test
