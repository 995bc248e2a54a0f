// A picture in memory: rectangles, lines, small text, and a PNG file at the end. Masks, plans and replays are drawn on
// it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/export.hpp"

namespace qkv {

struct Colour {
  uint8_t red, green, blue;
};

// share 0 = from, 1 = to.
QKV_EXPORT Colour mix(Colour from, Colour to, double share);

class QKV_EXPORT Canvas {
 public:
  // Text is two pixels a dot: 12 x 18 pixels a character, spacing included.
  static constexpr int32_t kTextWidth = 12;
  static constexpr int32_t kTextHeight = 14;  // without descenders

  Canvas(int32_t width, int32_t height, Colour background);

  int32_t width() const { return width_; }
  int32_t height() const { return height_; }
  // Parts outside the picture are left out.
  void fill(int32_t x, int32_t y, int32_t width, int32_t height, Colour colour);
  // Two pixels wide, from point to point, rising x.
  void line(int32_t x0, int32_t y0, int32_t x1, int32_t y1, Colour colour);
  // Top left corner of the first character. Letters are drawn small; characters without a glyph leave a gap.
  void write(int32_t x, int32_t y, std::string_view text, Colour colour);
  void write_png(const std::string& path) const;

 private:
  int32_t width_;
  int32_t height_;
  std::vector<uint8_t> pixels_;  // [height, width, 3]
};

}  // namespace qkv
