// A picture in memory for the command's own plots: rectangles, lines, text, and a PNG file at the end. (The library
// draws masks with a canvas of its own, which the command cannot see.)
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace qkv::tools {

struct Colour {
  uint8_t red, green, blue;
};

class Raster {
 public:
  // Text is two pixels a dot.
  static constexpr int32_t kTextWidth = 12;  // of a character, with the gap after it
  static constexpr int32_t kTextHeight = 14;

  Raster(int32_t width, int32_t height, Colour background);

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

}  // namespace qkv::tools
