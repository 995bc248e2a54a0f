// A report's course as a picture.
#pragma once

#include <string>

#include "report.hpp"

namespace qkv::replay {

void draw_report_png(const Report& report, const std::string& path);

}  // namespace qkv::replay
