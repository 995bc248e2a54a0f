// Curves over one axis, panel below panel, as a PNG file.
#pragma once

#include <string>
#include <vector>

namespace qkv::tools {

struct Curve {
  std::string name;
  std::vector<double> y;  // one a point of the chart's x
};

struct Panel {
  std::string title;
  bool logarithmic = false;  // values of 0 or less lie at the lower edge
  std::vector<Curve> curves;
};

struct Chart {
  std::string title;
  std::string x_title;
  std::vector<double> x;  // never falling
  std::vector<Panel> panels;
};

// The ends of a panel's axis and the places of its marks, round numbers all, that hold every finite value of it.
struct Axis {
  double low = 0;
  double high = 1;
  std::vector<double> marks;
};
Axis axis_of(const Panel& panel);

void draw_chart_png(const Chart& chart, const std::string& path);

}  // namespace qkv::tools
