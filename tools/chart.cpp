#include "chart.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "qkv/canvas.hpp"

namespace qkv::tools {
namespace {

constexpr int32_t kWidth = 1100;
constexpr int32_t kLeft = 110;
constexpr int32_t kRight = 30;
constexpr int32_t kTop = 50;
constexpr int32_t kBottom = 60;
constexpr int32_t kPanelHeight = 150;
constexpr int32_t kPanelGap = 46;  // holds the panel's title
constexpr int32_t kPlotWidth = kWidth - kLeft - kRight;
constexpr int32_t kMarks = 4;  // of a linear axis, about

constexpr Colour kPaper = {255, 255, 255};
constexpr Colour kInk = {40, 40, 48};
constexpr Colour kGrid = {224, 226, 230};
constexpr std::array<Colour, 3> kCurves = {{{27, 94, 90}, {200, 132, 45}, {138, 143, 163}}};

// 1, 2 or 5 times a power of ten, at least `wanted`.
double round_step(double wanted) {
  const double power = std::pow(10, std::floor(std::log10(wanted)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= wanted * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

Axis linear_axis(double highest) {
  if (!(highest > 0)) return {0, 1, {0, 1}};
  const double step = round_step(highest / kMarks);
  Axis axis{0, step * std::ceil(highest / step - 1e-9), {}};
  for (int32_t mark = 0; mark * step <= axis.high * (1 + 1e-9); ++mark) axis.marks.push_back(mark * step);
  return axis;
}

Axis logarithmic_axis(double lowest, double highest) {
  if (!(highest > 0)) return {0.1, 1, {0.1, 1}};
  const double first = std::floor(std::log10(lowest) + 1e-9);
  const double last = std::max(std::ceil(std::log10(highest) - 1e-9), first + 1);
  Axis axis{std::pow(10, first), std::pow(10, last), {}};
  for (double exponent = first; exponent <= last; ++exponent) axis.marks.push_back(std::pow(10, exponent));
  return axis;
}

class Drawing {
 public:
  explicit Drawing(const Chart& chart)
      : chart_(chart),
        canvas_(kWidth, kTop + static_cast<int32_t>(chart.panels.size()) * (kPanelHeight + kPanelGap) + kBottom,
                kPaper) {}

  Canvas draw() {
    canvas_.write(kLeft, 16, chart_.title, kInk);
    int32_t top = kTop + kPanelGap;
    for (const Panel& panel : chart_.panels) {
      draw_panel(panel, top);
      top += kPanelHeight + kPanelGap;
    }
    draw_x_marks(top - kPanelGap + 8);
    return std::move(canvas_);
  }

 private:
  int32_t x_of(double x) const {
    const double last = chart_.x.empty() ? 0 : chart_.x.back();
    return kLeft + static_cast<int32_t>(std::lround(last > 0 ? x / last * kPlotWidth : 0));
  }

  void draw_panel(const Panel& panel, int32_t top) {
    const Axis axis = axis_of(panel);
    const auto y_of = [&](double y) {
      const double share = panel.logarithmic
                               ? std::log(std::max(y, axis.low) / axis.low) / std::log(axis.high / axis.low)
                               : (y - axis.low) / (axis.high - axis.low);
      return top + kPanelHeight - static_cast<int32_t>(std::lround(std::clamp(share, 0.0, 1.0) * kPanelHeight));
    };
    draw_titles(panel, top - 28);
    for (const double mark : axis.marks) {
      canvas_.fill(kLeft, y_of(mark), kPlotWidth, 1, kGrid);
      const std::string text = fmt::format("{:g}", mark);
      const int32_t width = static_cast<int32_t>(text.size()) * Canvas::kTextWidth;
      canvas_.write(kLeft - 10 - width, y_of(mark) - Canvas::kTextHeight / 2, text, kInk);
    }
    for (size_t curve = 0; curve < panel.curves.size(); ++curve) {
      draw_curve(panel.curves[curve].y, y_of, kCurves[curve % kCurves.size()]);
    }
    canvas_.fill(kLeft, top, 1, kPanelHeight, kInk);
    canvas_.fill(kLeft, top + kPanelHeight, kPlotWidth, 1, kInk);
  }

  // The panel's title, then each curve's name in its colour.
  void draw_titles(const Panel& panel, int32_t y) {
    canvas_.write(kLeft, y, panel.title, kInk);
    auto x = static_cast<int32_t>(kLeft + (panel.title.size() + 2) * Canvas::kTextWidth);
    for (size_t curve = 0; panel.curves.size() > 1 && curve < panel.curves.size(); ++curve) {
      canvas_.write(x, y, panel.curves[curve].name, kCurves[curve % kCurves.size()]);
      x += static_cast<int32_t>((panel.curves[curve].name.size() + 2) * Canvas::kTextWidth);
    }
  }

  template <class YOf>
  void draw_curve(const std::vector<double>& y, const YOf& y_of, Colour colour) {
    for (size_t i = 0; i + 1 < y.size(); ++i) {
      canvas_.line(x_of(chart_.x[i]), y_of(y[i]), x_of(chart_.x[i + 1]), y_of(y[i + 1]), colour);
    }
    if (y.size() == 1) canvas_.fill(x_of(chart_.x[0]) - 2, y_of(y[0]) - 2, 4, 4, colour);
  }

  void draw_x_marks(int32_t y) {
    const double last = chart_.x.empty() ? 0 : chart_.x.back();
    for (const double mark : linear_axis(last).marks) {
      if (mark > last) break;
      const std::string text = fmt::format("{:g}", mark);
      canvas_.write(x_of(mark) - static_cast<int32_t>(text.size()) * Canvas::kTextWidth / 2, y, text, kInk);
    }
    canvas_.write(kLeft, y + 26, chart_.x_title, kInk);
  }

  const Chart& chart_;
  Canvas canvas_;
};

}  // namespace

Axis axis_of(const Panel& panel) {
  double lowest = INFINITY;
  double highest = -INFINITY;
  for (const Curve& curve : panel.curves) {
    for (const double y : curve.y) {
      if (!std::isfinite(y)) continue;
      highest = std::max(highest, y);
      if (y > 0) lowest = std::min(lowest, y);
    }
  }
  return panel.logarithmic ? logarithmic_axis(lowest, highest) : linear_axis(highest);
}

void draw_chart_png(const Chart& chart, const std::string& path) { Drawing(chart).draw().write_png(path); }

}  // namespace qkv::tools
