#include "plot.hpp"

#include "../chart.hpp"

namespace qkv::replay {

void draw_report_png(const Report& report, const std::string& path) {
  tools::Chart chart;
  const auto word = [&](const char* key) { return report.setting().value(key, std::string()); };
  chart.title = word("trace") + ": " + word("model");
  chart.x_title = "seconds since the replay began, " + word("device");
  tools::Panel time{"ms a step:", true, {{"worst", {}}, {"mean", {}}, {"planning", {}}}};
  tools::Panel tokens{"new tokens a step", false, {{"tokens", {}}}};
  tools::Panel requests{"requests a step", false, {{"requests", {}}}};
  tools::Panel cache{"cache in use, %", false, {{"cache", {}}}};
  for (const TimelinePoint& point : report.timeline().points()) {
    const auto steps = static_cast<double>(point.num_steps);
    chart.x.push_back(point.end_seconds);
    time.curves[0].y.push_back(point.worst_step_seconds * 1e3);
    time.curves[1].y.push_back(point.step_seconds / steps * 1e3);
    time.curves[2].y.push_back(point.planning_seconds / steps * 1e3);
    tokens.curves[0].y.push_back(static_cast<double>(point.tokens) / steps);
    requests.curves[0].y.push_back(static_cast<double>(point.requests) / steps);
    cache.curves[0].y.push_back(100.0 * point.pages_used / report.num_pages());
  }
  chart.panels = {time, tokens, requests, cache};
  tools::draw_chart_png(chart, path);
}

}  // namespace qkv::replay
