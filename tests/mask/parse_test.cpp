// The text form: what it accepts, that it gives back the same tree, and that every refusal says where and why.
#include "mask/expression.hpp"
#include "random_mask.hpp"
#include "scene_of.hpp"

namespace qkv::test {
namespace {

bool same_tree(const mask_detail::Node& a, const mask_detail::Node& b) {
  const auto same_child = [](const mask_detail::NodePtr& left, const mask_detail::NodePtr& right) {
    return (left == nullptr) == (right == nullptr) && (left == nullptr || same_tree(*left, *right));
  };
  return a.opcode == b.opcode && a.scope == b.scope && a.constant == b.constant && a.name == b.name &&
         same_child(a.left, b.left) && same_child(a.right, b.right);
}

TEST(Parse, text_of_a_mask_parses_back_to_the_same_tree) {
  for (int32_t seed = 0; seed < 3000; ++seed) {
    std::mt19937 generator(seed);
    const Mask mask = RandomMask(generator).truth(seed % 6);
    ASSERT_TRUE(same_tree(*parse_mask(mask.text()).node(), *mask.node())) << "seed " << seed << ": " << mask.text();
  }
}

TEST(Parse, built_ins_are_callable) {
  const std::vector<std::pair<const char*, Mask>> pairs = {
      {"causal", mask::causal()},
      {"causal()", mask::causal()},
      {"everything", mask::everything()},
      {"true", mask::everything()},
      {"nothing", mask::nothing()},
      {"false", mask::nothing()},
      {"window(127, 0)", mask::window(127, 0)},
      {"window(-1,-1)", mask::window(-1, -1)},
      {"window( 9223372036854775807 , 0 )", mask::window(INT64_MAX, 0)},
      {"sliding_window(4)", mask::sliding_window(4)},
      {"sliding_window(4, true)", mask::sliding_window(4, true)},
      {"sliding_window(4, 0)", mask::sliding_window(4, false)},
      {"rswa(64)", mask::rswa(64)},
      {"prefix_lm", mask::prefix_lm()},
      {"prefix_lm(8)", mask::prefix_lm(8)},
      {"prefix_lm(8, 1)", mask::prefix_lm(8, true)},
      {"per_request_causal", mask::per_request_causal()},
      {"document & causal", mask::document() & mask::causal()},
      {"tree", mask::tree()},
  };
  for (const auto& [text, mask] : pairs) EXPECT_EQ(parse_mask(text).text(), mask.text()) << text;
}

TEST(Parse, comparisons_bind_tighter_than_not_than_and_than_or) {
  EXPECT_EQ(parse_mask("~q_pos < 1 & kv_pos == 2 | true").text(),
            ((~(mask::q_pos() < 1) & (mask::kv_pos() == 2)) | mask::everything()).text());
  EXPECT_EQ(parse_mask("q_head == 1 | q_head == 2 & causal").text(),
            ((mask::q_head() == 1) | ((mask::q_head() == 2) & mask::causal())).text());
}

TEST(Parse, spaces_and_superfluous_parentheses_do_not_matter) {
  EXPECT_EQ(parse_mask(" \t\n((kv_pos))<=( q_pos ) ").hash(), mask::causal().hash());
  EXPECT_EQ(parse_mask("q_pos-kv_pos<=-3").text(), "q_pos - kv_pos <= -3");
  EXPECT_EQ(parse_mask("q_pos--3<kv_pos").text(), "q_pos - -3 < kv_pos");
  EXPECT_EQ(parse_mask("kv_pos >= prefix_len [ request ]").text(), "prefix_len[request] <= kv_pos");
}

TEST(Parse, errors_say_where_and_what_was_expected) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"", "mask: got the end at character 1; allowed: a number, an atom"},
      {"causal &", "the end at character 9; allowed: a number, an atom"},
      {"causal & )", "\")\" at character 10"},
      {"(causal", "the end at character 8; allowed: )"},
      {"causal causal", "\"causal\" at character 8; allowed: an operator or the end"},
      {"causal && tree", "\"& tree\" at character 9"},
      {"kv_pos", "\"kv_pos\" at character 1; allowed: a truth"},
      {"causal & 3", "\"3\" at character 10; allowed: a truth"},
      {"~kv_pos", "\"kv_pos\" at character 2; allowed: a truth"},
      {"1 + causal < 3", "\"causal < 3\" at character 5; allowed: a number instead of a truth"},
      {"1 < 2 < 3", "\"< 3\" at character 7; allowed: no second comparison"},
      {"kv_pos = q_pos", "\"= q_pos\" at character 8"},
      {"kv_pos <= q_position", "\"q_position\" at character 11; allowed: q_pos, kv_pos"},
      {"a[row] == 1", "\"row] == 1\" at character 3; allowed: request, query, new_key or key"},
      {"a[key == 1", "\"== 1\" at character 7; allowed: ]"},
      {"window(3)", "\"window(3)\" at character 1; allowed: window(window_left, window_right)"},
      {"causal & window", "\"window\" at character 10; allowed: window(window_left, window_right)"},
      {"causal(1)", "allowed: causal"},
      {"window(q_pos, 0)", "\"q_pos, 0)\" at character 8; allowed: an integer, true or false"},
      {"kv_pos < 99999999999999999999", "at character 10; allowed: an integer of at most 64 bits"},
      {"kv_pos < 12abc", "\"12abc\" at character 10"},
      {"kv_pos < - 3", "\"- 3\" at character 10"},
      {"kv_pos < 2000000000000000000", "constants from -2^60 to 2^60"},
      {"window(-5, 0)", "window_left: got -5"},
      {"q_pos[key] == 1", "operand name: got \"q_pos\""},
      {"a[key] == 1 & a[request] == 2", "operand a used both as"},
  };
  for (const auto& [text, part] : cases) {
    SCOPED_TRACE(text);
    expect_refused([text = text] { parse_mask(text); }, part);
  }
}

TEST(Parse, long_text_is_shortened_in_errors) {
  const std::string message = error_of([] { parse_mask("causal ? " + std::string(10000, 'x')); });
  EXPECT_LT(message.size(), 200u);
  EXPECT_NE(message.find("at character 8"), std::string::npos) << message;
}

TEST(Parse, hostile_nesting_is_refused_without_overflowing_the_stack) {
  constexpr int32_t kMany = 1000000;
  expect_refused([] { parse_mask(std::string(kMany, '(')); }, "at most 256 nested");
  expect_refused([] { parse_mask(std::string(kMany, '~') + "causal"); }, "at most 256 nested");
  std::string chain = "causal";
  for (int32_t i = 0; i < 20000; ++i) chain += "|causal";
  expect_refused([&] { parse_mask(chain); }, "nested 257 deep");
  std::string sum = "1";
  for (int32_t i = 0; i < 20000; ++i) sum += "+1";
  expect_refused([&] { parse_mask(sum + " < 3"); }, "nested 257 deep");
}

TEST(Parse, any_bytes_are_refused_or_parsed) {
  const std::string symbols =
      "()~&|<>=!+-[],.0123456789 \t\xff"
      "akqv_pos";
  std::mt19937 generator(3);
  for (int32_t repeat = 0; repeat < 20000; ++repeat) {
    std::string text;
    const size_t length = generator() % 24;
    while (text.size() < length) text += symbols[generator() % symbols.size()];
    try {
      const Mask mask = parse_mask(text);
      EXPECT_EQ(parse_mask(mask.text()).text(), mask.text());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    }
  }
}

}  // namespace
}  // namespace qkv::test
