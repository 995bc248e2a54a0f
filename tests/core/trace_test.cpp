// Tracing a choice over the ranges of its inputs.
#include "core/trace.hpp"

#include <gmock/gmock.h>

#include "qkv/status.hpp"

namespace qkv {
namespace {

using ::testing::ElementsAre;

TEST(Trace, ranges_end_before_their_end) {
  EXPECT_THAT(Axis::range(1, 4).values(), ElementsAre(1, 2, 3));
  EXPECT_THAT(Axis::range(0, 7, 3).values(), ElementsAre(0, 3, 6));
  EXPECT_THAT(Axis::range(1, 17, [](int64_t v) { return 2 * v; }).values(), ElementsAre(1, 2, 4, 8, 16));
  EXPECT_TRUE(Axis::range(4, 4).values().empty());
}

TEST(Trace, product_in_order_first_slowest_and_rows_in_step) {
  TraceDomain domain;
  domain.add("a", Axis::choices({2, 1})).add_rows({{{"b", 10}, {"c", 100}}, {{"b", 20}, {"c", 200}}});
  const auto seen = trace(domain, [](const TracePoint& p) { return p.at("a") * 1000 + p.at("b") + p.at("c"); });
  EXPECT_THAT(seen, ElementsAre(2110, 2220, 1110, 1220));
}

TEST(Trace, results_are_kept_once_in_the_order_first_seen) {
  TraceDomain domain;
  domain.add("a", Axis::range(0, 10));
  EXPECT_THAT(trace(domain, [](const TracePoint& p) { return (p.at("a") + 2) % 3; }), ElementsAre(2, 0, 1));
}

TEST(Trace, filters_leave_points_out_before_the_function_sees_them) {
  TraceDomain domain;
  domain.add("a", Axis::range(0, 4)).add("b", Axis::range(0, 4));
  domain.keep_if([](const TracePoint& p) { return p.at("a") != 0; });
  domain.keep_if([](const TracePoint& p) { return p.at("b") % p.at("a") == 0 && p.at("b") > p.at("a"); });
  EXPECT_THAT(trace(domain, [](const TracePoint& p) { return p.at("b") / p.at("a"); }), ElementsAre(2, 3));
}

TEST(Trace, no_inputs_are_one_point) {
  EXPECT_THAT(trace(TraceDomain(), [](const TracePoint&) { return 7; }), ElementsAre(7));
}

TEST(Trace, bad_ranges_and_names_are_refused) {
  EXPECT_THROW(Axis::range(0, 4, 0), Error);
  EXPECT_THROW(Axis::range(0, 4, [](int64_t v) { return v; }), Error);
  EXPECT_THROW(Axis::range(0, 4, [](int64_t v) { return v - 1; }), Error);
  TraceDomain domain;
  domain.add("a", Axis::range(0, 4));
  EXPECT_THROW(domain.add("a", Axis::range(0, 2)), Error);
  EXPECT_THROW(domain.add("", Axis::range(0, 2)), Error);
  EXPECT_THROW(domain.add("b", Axis::range(0, 0)), Error);
  EXPECT_THROW(domain.add_rows({}), Error);
  EXPECT_THROW(domain.add_rows({{}}), Error);
  EXPECT_THROW(domain.add_rows({{{"", 1}}}), Error);
  EXPECT_THROW(domain.add_rows({{{"b", 1}}, {{"c", 1}}}), Error);
  EXPECT_THROW(domain.add_rows({{{"b", 1}, {"a", 1}}}), Error);
}

}  // namespace
}  // namespace qkv
