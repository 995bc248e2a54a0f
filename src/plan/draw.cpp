// The picture of a plan: a line a worker, time from left to right, a bar an item.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "qkv/canvas.hpp"
#include "qkv/plan.hpp"

namespace qkv {
namespace plan {
namespace {

constexpr int32_t kPlotWidth = 1200;
constexpr int32_t kMargin = 24;
constexpr int32_t kLabelWidth = 5 * Canvas::kTextWidth;
constexpr int32_t kLegendHeight = 3 * Canvas::kTextHeight;
constexpr int32_t kAxisHeight = 2 * Canvas::kTextHeight + 8;
constexpr int32_t kMaxLines = 256;
constexpr int32_t kMaxLineHeight = 36;
constexpr int32_t kMinLineHeight = 5;

constexpr Colour kPaper = {255, 255, 255};
constexpr Colour kInk = {71, 80, 94};
constexpr Colour kGrid = {226, 230, 236};
constexpr Colour kFewRows = {58, 110, 190};
constexpr Colour kManyRows = {222, 135, 42};
constexpr Colour kShared = {46, 150, 96};

Colour colour_of(const PlanItem& item) {
  if (item.requests.size() > 1) return kShared;
  return item.few_rows ? kFewRows : kManyRows;
}

// 1, 2 or 5 times a power of ten, so that about eight fit into the whole.
double tick_step(double whole) {
  const double wanted = whole / 8;
  const double power = std::pow(10.0, std::floor(std::log10(wanted)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= wanted) return factor * power;
  }
  return 10 * power;
}

std::string time_text(double seconds) {
  return seconds < 1e-3 ? fmt::format("{:.3g} us", seconds * 1e6) : fmt::format("{:.4g} ms", seconds * 1e3);
}

class Picture {
 public:
  explicit Picture(const PlanReport& report)
      : report_(report),
        lines_(std::clamp(report.num_workers, 1, kMaxLines)),
        line_height_(std::clamp(700 / lines_, kMinLineHeight, kMaxLineHeight)),
        seconds_(end_of_items(report)),
        canvas_(2 * kMargin + kLabelWidth + kPlotWidth,
                2 * kMargin + kLegendHeight + lines_ * line_height_ + kAxisHeight, kPaper) {}

  void draw(const std::string& path) {
    draw_legend();
    draw_axis();
    draw_lines();
    canvas_.write_png(path);
  }

 private:
  static double end_of_items(const PlanReport& report) {
    double end = 1e-9;
    for (const PlanItem& item : report.items) end = std::max(end, item.end_seconds);
    return end;
  }

  int32_t x_of(double seconds) const {
    return kMargin + kLabelWidth + static_cast<int32_t>(std::lround(seconds / seconds_ * kPlotWidth));
  }
  int32_t top() const { return kMargin + kLegendHeight; }
  int32_t bottom() const { return top() + lines_ * line_height_; }

  void draw_legend() {
    int32_t x = kMargin + kLabelWidth;
    const auto entry = [&](Colour colour, std::string_view text) {
      canvas_.fill(x, kMargin, Canvas::kTextHeight, Canvas::kTextHeight, colour);
      canvas_.write(x + 2 * Canvas::kTextWidth, kMargin, text, kInk);
      x += static_cast<int32_t>(text.size() + 5) * Canvas::kTextWidth;
    };
    entry(kFewRows, "few rows");
    entry(kManyRows, "many rows");
    entry(kShared, "shared keys");
    const std::string what = report_.device + "  " + time_text(report_.seconds);
    canvas_.write(kMargin + kLabelWidth + kPlotWidth - static_cast<int32_t>(what.size()) * Canvas::kTextWidth, kMargin,
                  what, kInk);
  }

  void draw_axis() {
    const double step = tick_step(seconds_);
    for (double time = 0; time <= seconds_ * 1.0001; time += step) {
      canvas_.fill(x_of(time), top(), 1, lines_ * line_height_ + 6, kGrid);
      const std::string text = time_text(time);
      const int32_t x = x_of(time) - static_cast<int32_t>(text.size()) * Canvas::kTextWidth / 2;
      canvas_.write(std::min(x, canvas_.width() - static_cast<int32_t>(text.size()) * Canvas::kTextWidth),
                    bottom() + 12, text, kInk);
    }
  }

  void draw_lines() {
    const int32_t every = std::max(1, 3 * Canvas::kTextHeight / (2 * line_height_));
    for (int32_t worker = 0; worker < lines_; worker += every) {
      canvas_.write(kMargin, top() + worker * line_height_ + std::max(0, (line_height_ - Canvas::kTextHeight) / 2),
                    fmt::format("{:>4}", worker), kInk);
    }
    std::vector<int32_t> count(lines_, 0);  // of bars, so that neighbours differ in shade
    for (const PlanItem& item : report_.items) {
      if (item.worker >= lines_) continue;
      const int32_t begin = x_of(item.begin_seconds);
      const int32_t width = std::max(1, x_of(item.end_seconds) - begin);
      const double light = 0.32 * (count[item.worker]++ % 2);
      canvas_.fill(begin, top() + item.worker * line_height_, width, line_height_ - 1,
                   mix(colour_of(item), kPaper, light));
    }
  }

  const PlanReport& report_;
  const int32_t lines_;
  const int32_t line_height_;
  const double seconds_;
  Canvas canvas_;
};

}  // namespace
}  // namespace plan

void draw_plan_png(const PlanReport& report, const std::string& path) { plan::Picture(report).draw(path); }

}  // namespace qkv
