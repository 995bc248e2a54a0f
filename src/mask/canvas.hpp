// A picture in memory: rectangles, small text, and a PNG file at the end.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace qkv::mask {

struct Colour {
  uint8_t red, green, blue;
};

// share 0 = from, 1 = to.
Colour mix(Colour from, Colour to, double share);

class Canvas {
 public:
  // Text is two pixels a dot: 12 x 18 pixels a character, spacing included.
  static constexpr int32_t kTextWidth = 12;
  static constexpr int32_t kTextHeight = 14;  // without descenders

  Canvas(int32_t width, int32_t height, Colour background);

  int32_t width() const { return width_; }
  int32_t height() const { return height_; }
  // Parts outside the picture are left out.
  void fill(int32_t x, int32_t y, int32_t width, int32_t height, Colour colour);
  // Top left corner of the first character. Characters without a glyph leave a gap.
  void write(int32_t x, int32_t y, std::string_view text, Colour colour);
  void write_png(const std::string& path) const;

 private:
  int32_t width_;
  int32_t height_;
  std::vector<uint8_t> pixels_;  // [height, width, 3]
};

}  // namespace qkv::mask
