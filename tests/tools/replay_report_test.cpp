#include <gtest/gtest.h>

#include <cmath>

#include "chart.hpp"
#include "replay/report.hpp"

namespace qkv::replay {
namespace {

TEST(Histogram, percentiles_are_within_a_percent_and_the_worst_is_exact) {
  Histogram histogram;
  for (int i = 1; i <= 1000; ++i) histogram.add(i * 1e-5);
  EXPECT_NEAR(histogram.percentile(50), 500e-5, 0.01 * 500e-5);
  EXPECT_NEAR(histogram.percentile(95), 950e-5, 0.01 * 950e-5);
  EXPECT_NEAR(histogram.percentile(99), 990e-5, 0.01 * 990e-5);
  EXPECT_DOUBLE_EQ(histogram.worst(), 1e-2);
  EXPECT_NEAR(histogram.mean(), 500.5e-5, 1e-9);
}

TEST(Histogram, one_value_is_every_percentile) {
  Histogram histogram;
  histogram.add(0.125);
  for (const double percent : {0.1, 50.0, 99.9, 100.0}) EXPECT_NEAR(histogram.percentile(percent), 0.125, 0.125 * 0.01);
}

TEST(Histogram, holds_zero_and_hours) {
  Histogram histogram;
  EXPECT_EQ(histogram.percentile(50), 0);
  histogram.add(0);
  EXPECT_EQ(histogram.percentile(50), 0);
  histogram.add(1e6);
  EXPECT_EQ(histogram.worst(), 1e6);
  EXPECT_EQ(histogram.count(), 2);
}

TEST(Timeline, joins_neighbours_and_loses_nothing) {
  Timeline timeline;
  constexpr int64_t kSteps = 100'000;
  for (int64_t i = 0; i < kSteps; ++i) {
    const double seconds = i == 70'000 ? 5 : 0.5;
    timeline.add({1, static_cast<double>(i + 1), seconds, seconds, 0.25, 3, 2, static_cast<int32_t>(i % 7), 11});
  }
  ASSERT_LE(timeline.points().size(), Timeline::kMaxPoints);
  ASSERT_GT(timeline.points().size(), Timeline::kMaxPoints / 2 - 1);
  TimelinePoint whole = timeline.points().front();
  for (size_t i = 1; i < timeline.points().size(); ++i) {
    EXPECT_GT(timeline.points()[i].end_seconds, whole.end_seconds);
    whole.join(timeline.points()[i]);
  }
  EXPECT_EQ(whole.num_steps, kSteps);
  EXPECT_EQ(whole.end_seconds, kSteps);
  EXPECT_NEAR(whole.step_seconds, 0.5 * kSteps + 4.5, 1e-6);
  EXPECT_EQ(whole.worst_step_seconds, 5);
  EXPECT_EQ(whole.tokens, 3 * kSteps);
  EXPECT_EQ(whole.requests, 2 * kSteps);
  EXPECT_EQ(whole.waiting, 6);
  EXPECT_EQ(whole.pages_used, 11);
}

TEST(Report, shares_and_rates_are_over_the_steps_time) {
  Report report({{"trace", "a"}}, 100, 7);
  report.add({1.0, 0.1, {0.1, 0.2, 0.5, 0.1}, 4, 3, 50, 40, 1000, 3000});
  report.add({9.0, 0.0, {0.3, 0.2, 0.5, 0.0}, 2, 9, 30, 20, 1000, 5000});
  report.add_idle(7);
  report.finish({5, 12, 60, 8, 2});
  const auto json = report.json();
  EXPECT_EQ(json["steps"], 2);
  EXPECT_EQ(json["requests"]["finished"], 5);
  EXPECT_DOUBLE_EQ(json["seconds"]["in_steps"], 2.0);
  EXPECT_DOUBLE_EQ(json["share"]["planning"], 0.2);
  EXPECT_DOUBLE_EQ(json["share"]["attention"], 0.5);
  EXPECT_DOUBLE_EQ(json["share"]["scheduling"], 0.05);
  EXPECT_DOUBLE_EQ(json["rate"]["tokens_a_second"], 30);
  EXPECT_DOUBLE_EQ(json["rate"]["generated_a_second"], 6);
  EXPECT_DOUBLE_EQ(json["rate"]["bytes_a_second"], 1000);
  EXPECT_DOUBLE_EQ(json["rate"]["operations_a_second"], 4000);
  EXPECT_DOUBLE_EQ(json["batch"]["mean_requests"], 3);
  EXPECT_EQ(json["batch"]["most_waiting"], 9);
  EXPECT_DOUBLE_EQ(json["cache"]["mean_use"], 0.4);
  EXPECT_DOUBLE_EQ(json["cache"]["most_use"], 0.5);
  EXPECT_EQ(json["timeline"].size(), 2U);
  EXPECT_NE(report.text().find("5 of 7 requests in 2 steps"), std::string::npos) << report.text();
}

}  // namespace
}  // namespace qkv::replay

namespace qkv::tools {
namespace {

TEST(ChartAxis, linear_axes_begin_at_zero_and_end_at_a_round_number) {
  const Axis axis = axis_of({"", false, {{"", {3, 87}}, {"", {12, INFINITY}}}});
  EXPECT_EQ(axis.low, 0);
  EXPECT_EQ(axis.high, 100);
  EXPECT_EQ(axis.marks, (std::vector<double>{0, 50, 100}));
}

TEST(ChartAxis, logarithmic_axes_hold_all_positive_values) {
  const Axis axis = axis_of({"", true, {{"", {0.03, 0}}, {"", {250}}}});
  EXPECT_DOUBLE_EQ(axis.low, 0.01);
  EXPECT_DOUBLE_EQ(axis.high, 1000);
  EXPECT_EQ(axis.marks.size(), 6U);
}

TEST(ChartAxis, panels_without_values_have_one) {
  EXPECT_LT(axis_of({"", false, {{"", {}}}}).low, axis_of({"", false, {{"", {}}}}).high);
  EXPECT_LT(axis_of({"", true, {{"", {0}}}}).low, axis_of({"", true, {{"", {0}}}}).high);
}

}  // namespace
}  // namespace qkv::tools
