// A slice of `qkv check`: random cases over the whole feature space against the oracle.
#include "support/small_layer.hpp"

namespace qkv {
namespace {

class random_cases : public ::testing::TestWithParam<int64_t> {};

TEST_P(random_cases, agree_with_the_oracle) {
  constexpr int64_t kCasesEach = 60;
  for (int64_t i = 0; i < kCasesEach; ++i) {
    const tools::Case c = tools::draw_case(41, GetParam() * kCasesEach + i);
    ASSERT_EQ(tools::failure_of(c), "") << "qkv check --seed 41 --cases 1 --first " << c.index << "\n"
                                        << tools::describe(c);
  }
}

INSTANTIATE_TEST_SUITE_P(api, random_cases, ::testing::Range<int64_t>(0, 10));

}  // namespace
}  // namespace qkv
