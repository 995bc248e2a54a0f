// Programs and their inputs: what compile() decides beforehand, and what a scene must bring.
#include <limits>

#include "scene_of.hpp"

namespace qkv::test {
namespace {

using mask::kv_pos;
using mask::operand;
using mask::q_pos;

TEST(Compile, equal_subexpressions_are_one_instruction) {
  const Mask mask = (q_pos() - kv_pos() <= 3) & (q_pos() - kv_pos() != 1);
  EXPECT_EQ(mask::compile(mask).code.size(), 9u);  // q_pos, kv_pos, -, 3, <=, 1, ==, ~, &
}

TEST(Compile, what_needs_no_batch_is_decided) {
  const auto code_of = [](const Mask& mask) { return mask::compile(mask).code; };
  for (const char* text : {"1 + 2 < 4", "true | causal", "~(false & causal)", "q_pos == q_pos", "q_pos - q_pos == 0",
                           "kv_pos <= kv_pos", "~(kv_pos < kv_pos)", "true"}) {
    SCOPED_TRACE(text);
    const auto code = code_of(parse_mask(text));
    ASSERT_EQ(code.size(), 1u);
    EXPECT_EQ(code[0].opcode, mask::Opcode::truth);
    EXPECT_EQ(code[0].constant, 1);
  }
  EXPECT_EQ(code_of(mask::everything() & mask::causal()).size(), code_of(mask::causal()).size());
  EXPECT_EQ(code_of(mask::causal() | mask::causal()).size(), code_of(mask::causal()).size());
  EXPECT_EQ(code_of(~~mask::causal()).size(), code_of(mask::causal()).size());
}

TEST(Compile, head_dependence_is_noticed) {
  EXPECT_FALSE(mask::compile(mask::causal()).depends_on_head);
  EXPECT_TRUE(mask::compile(mask::causal() | (mask::q_head() < 2)).depends_on_head);
  EXPECT_FALSE(mask::compile(mask::everything() | (mask::q_head() < 2)).depends_on_head);
}

TEST(Compile, operands_are_those_of_the_mask) {
  const Mask mask = mask::everything() | mask::document();
  EXPECT_EQ(mask::compile(mask).operands, operands_of(mask));
}

TEST(EvaluateRow, values_beyond_32_bits_are_exact) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  constexpr int32_t kMin = std::numeric_limits<int32_t>::min();
  const std::vector<int32_t> a{kMax, kMin, kMax, kMin, 0};
  const std::vector<int32_t> b{kMin, kMax, kMax, kMin, 0};
  const MaskScene scene = scene_of(3, 5, {{"a", view_of(a)}, {"b", view_of(b)}});
  const MaskValue difference = operand("a", OperandScope::key) - operand("b", OperandScope::key);
  expect_visible(difference > kv_pos(), scene, [](int, int k) { return k == 0; });
  expect_visible(difference + int64_t{1} < 0, scene, [](int, int k) { return k == 1; });
  expect_visible(difference == int64_t{4294967295}, scene, [](int, int k) { return k == 0; });
  expect_visible(operand("a", OperandScope::key) + q_pos() + (int64_t{1} << 40) > 0, scene,
                 [](int, int) { return true; });
}

TEST(EvaluateRow, multiples_of_the_position_have_exact_edges) {
  const MaskScene scene = scene_of(7, 40);
  expect_visible(kv_pos() + kv_pos() + kv_pos() < q_pos() + q_pos(), scene, [](int q, int k) { return 3 * k < 2 * q; });
  expect_visible(q_pos() - kv_pos() - kv_pos() <= -7, scene, [](int q, int k) { return q - 2 * k <= -7; });
  expect_visible(kv_pos() + kv_pos() == q_pos(), scene, [](int q, int k) { return 2 * k == q; });
  expect_visible(kv_pos() + kv_pos() != q_pos() - 1, scene, [](int q, int k) { return 2 * k != q - 1; });
}

TEST(EvaluateRow, new_keys_read_zero_in_the_context) {
  const std::vector<int32_t> values{-1, 5, 6, 7};  // the request's own begin at 1
  MaskScene scene = scene_of(3, 8, {{"a", view_of(values)}});
  scene.query_start = 1;
  const MaskValue at_key = operand("a", OperandScope::new_key);
  expect_visible(at_key == 0, scene, [](int, int k) { return k < 5; });
  expect_visible(at_key <= operand("a", OperandScope::query), scene, [](int q, int k) { return k <= q; });
}

TEST(EvaluateRow, scratch_serves_rows_of_any_length) {
  const Mask mask = mask::rswa(2) | (kv_pos() == 11);
  const std::vector<int32_t> prefix_len{3};
  const MaskScene scene = scene_of(20, 20, {{"prefix_len", view_of(prefix_len)}});
  const mask::Program program = mask::compile(mask);
  const mask::ProgramInput input = mask::bind_scene(program.operands, scene);
  mask::RowScratch scratch;
  for (const int32_t length : {20, 1, 7, 20, 0, 13}) {
    std::vector<int32_t> row(length);
    mask::evaluate_row(program, input, 9, 0, 0, length, row.data(), scratch);
    for (int32_t key = 0; key < length; ++key) EXPECT_EQ(row[key] != 0, is_visible(mask, scene, 9, key)) << key;
  }
}

TEST(Scene, missing_or_short_operands_are_refused_by_name) {
  const std::vector<int32_t> three{1, 2, 3};
  const Mask mask = mask::document();
  const MaskOperand query{"query_document", view_of(three)};
  expect_refused([&] { is_visible(mask, scene_of(3, 3, {query}), 0, 0); },
                 "operand key_document: got nothing; allowed: i32[3] or longer");
  expect_refused(
      [&] {
        is_visible(mask, scene_of(3, 4, {query, {"key_document", view_of(three)}}), 0, 0);
      },
      "operand key_document: got i32[3]; allowed: i32[4] or longer");
  MaskScene second = scene_of(1, 1, {{"prefix_len", view_of(three)}});
  second.request = 3;
  expect_refused([&] { is_visible(mask::rswa(1), second, 0, 0); }, "operand prefix_len: got i32[3]; allowed: i32[4]");
}

TEST(Scene, operands_of_another_type_are_refused) {
  const std::vector<int64_t> wide{1, 2, 3};
  const Tensor values = Tensor::contiguous(wide.data(), DType::i64, {3});
  expect_refused(
      [&] {
        is_visible(mask::rswa(1), scene_of(1, 1, {{"prefix_len", values}}), 0, 0);
      },
      "operand prefix_len: got i64[3]");
  const std::vector<int32_t> narrow{1, 2, 3, 4};
  const Tensor strided = Tensor::strided(narrow.data(), DType::i32, {2}, {2});
  expect_refused([&] { is_visible(mask::rswa(1), scene_of(1, 1, {{"prefix_len", strided}}), 0, 0); }, "contiguous");
}

TEST(Scene, pairs_outside_the_request_are_refused) {
  const MaskScene scene = scene_of(2, 3);
  expect_refused([&] { is_visible(mask::causal(), scene, 2, 0); }, "query: got 2; allowed: 0 to q_len - 1 = 1");
  expect_refused([&] { is_visible(mask::causal(), scene, 0, 3); }, "kv_pos: got 3; allowed: 0 to kv_len - 1 = 2");
  expect_refused([&] { is_visible(mask::causal(), scene_of(-1, 3), 0, 0); }, "q_len: got -1");
}

}  // namespace
}  // namespace qkv::test
