#include "raster.hpp"

#include <fmt/format.h>
#include <png.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

constexpr int32_t kDot = 2;  // pixels
constexpr int32_t kGlyphWidth = 5;
constexpr int32_t kGlyphHeight = 9;  // seven rows above the baseline, two below

// Five dots a row, the leftmost in bit 4.
struct Glyph {
  char character;
  std::array<uint8_t, kGlyphHeight> rows;
};

constexpr std::array<Glyph, 46> kGlyphs = {{
    {'0', {0x0e, 0x11, 0x13, 0x15, 0x19, 0x11, 0x0e, 0, 0}},
    {'1', {0x04, 0x0c, 0x04, 0x04, 0x04, 0x04, 0x0e, 0, 0}},
    {'2', {0x0e, 0x11, 0x01, 0x02, 0x04, 0x08, 0x1f, 0, 0}},
    {'3', {0x1f, 0x02, 0x04, 0x02, 0x01, 0x11, 0x0e, 0, 0}},
    {'4', {0x02, 0x06, 0x0a, 0x12, 0x1f, 0x02, 0x02, 0, 0}},
    {'5', {0x1f, 0x10, 0x1e, 0x01, 0x01, 0x11, 0x0e, 0, 0}},
    {'6', {0x06, 0x08, 0x10, 0x1e, 0x11, 0x11, 0x0e, 0, 0}},
    {'7', {0x1f, 0x01, 0x02, 0x04, 0x08, 0x08, 0x08, 0, 0}},
    {'8', {0x0e, 0x11, 0x11, 0x0e, 0x11, 0x11, 0x0e, 0, 0}},
    {'9', {0x0e, 0x11, 0x11, 0x0f, 0x01, 0x02, 0x0c, 0, 0}},
    {'a', {0, 0, 0x0e, 0x01, 0x0f, 0x11, 0x0f, 0, 0}},
    {'b', {0x10, 0x10, 0x16, 0x19, 0x11, 0x11, 0x1e, 0, 0}},
    {'c', {0, 0, 0x0e, 0x10, 0x10, 0x11, 0x0e, 0, 0}},
    {'d', {0x01, 0x01, 0x0d, 0x13, 0x11, 0x11, 0x0f, 0, 0}},
    {'e', {0, 0, 0x0e, 0x11, 0x1f, 0x10, 0x0e, 0, 0}},
    {'f', {0x06, 0x09, 0x08, 0x1c, 0x08, 0x08, 0x08, 0, 0}},
    {'g', {0, 0, 0x0f, 0x11, 0x11, 0x11, 0x0f, 0x01, 0x0e}},
    {'h', {0x10, 0x10, 0x16, 0x19, 0x11, 0x11, 0x11, 0, 0}},
    {'i', {0x04, 0, 0x0c, 0x04, 0x04, 0x04, 0x0e, 0, 0}},
    {'j', {0x02, 0, 0x06, 0x02, 0x02, 0x02, 0x02, 0x12, 0x0c}},
    {'k', {0x10, 0x10, 0x12, 0x14, 0x18, 0x14, 0x12, 0, 0}},
    {'l', {0x0c, 0x04, 0x04, 0x04, 0x04, 0x04, 0x0e, 0, 0}},
    {'m', {0, 0, 0x1a, 0x15, 0x15, 0x11, 0x11, 0, 0}},
    {'n', {0, 0, 0x16, 0x19, 0x11, 0x11, 0x11, 0, 0}},
    {'o', {0, 0, 0x0e, 0x11, 0x11, 0x11, 0x0e, 0, 0}},
    {'p', {0, 0, 0x1e, 0x11, 0x11, 0x11, 0x1e, 0x10, 0x10}},
    {'q', {0, 0, 0x0f, 0x11, 0x11, 0x11, 0x0f, 0x01, 0x01}},
    {'r', {0, 0, 0x16, 0x19, 0x10, 0x10, 0x10, 0, 0}},
    {'s', {0, 0, 0x0e, 0x10, 0x0e, 0x01, 0x1e, 0, 0}},
    {'t', {0x08, 0x08, 0x1c, 0x08, 0x08, 0x09, 0x06, 0, 0}},
    {'u', {0, 0, 0x11, 0x11, 0x11, 0x13, 0x0d, 0, 0}},
    {'v', {0, 0, 0x11, 0x11, 0x11, 0x0a, 0x04, 0, 0}},
    {'w', {0, 0, 0x11, 0x11, 0x15, 0x15, 0x0a, 0, 0}},
    {'x', {0, 0, 0x11, 0x0a, 0x04, 0x0a, 0x11, 0, 0}},
    {'y', {0, 0, 0x11, 0x11, 0x11, 0x11, 0x0f, 0x01, 0x0e}},
    {'z', {0, 0, 0x1f, 0x02, 0x04, 0x08, 0x1f, 0, 0}},
    {'.', {0, 0, 0, 0, 0, 0x0c, 0x0c, 0, 0}},
    {',', {0, 0, 0, 0, 0, 0x0c, 0x04, 0x08, 0}},
    {':', {0, 0, 0x0c, 0x0c, 0, 0x0c, 0x0c, 0, 0}},
    {'-', {0, 0, 0, 0x1f, 0, 0, 0, 0, 0}},
    {'_', {0, 0, 0, 0, 0, 0, 0, 0x1f, 0}},
    {'/', {0x01, 0x01, 0x02, 0x04, 0x08, 0x10, 0x10, 0, 0}},
    {'%', {0x18, 0x19, 0x02, 0x04, 0x08, 0x13, 0x03, 0, 0}},
    {'(', {0x02, 0x04, 0x08, 0x08, 0x08, 0x04, 0x02, 0, 0}},
    {')', {0x08, 0x04, 0x02, 0x02, 0x02, 0x04, 0x08, 0, 0}},
    {'+', {0, 0x04, 0x04, 0x1f, 0x04, 0x04, 0, 0, 0}},
}};

}  // namespace

Raster::Raster(int32_t width, int32_t height, Colour background)
    : width_(width), height_(height), pixels_(static_cast<size_t>(width) * static_cast<size_t>(height) * 3) {
  fill(0, 0, width, height, background);
}

void Raster::fill(int32_t x, int32_t y, int32_t width, int32_t height, Colour colour) {
  for (int32_t row = std::max(y, 0); row < std::min(y + height, height_); ++row) {
    for (int32_t column = std::max(x, 0); column < std::min(x + width, width_); ++column) {
      const size_t pixel = (static_cast<size_t>(row) * static_cast<size_t>(width_) + static_cast<size_t>(column)) * 3;
      pixels_[pixel] = colour.red;
      pixels_[pixel + 1] = colour.green;
      pixels_[pixel + 2] = colour.blue;
    }
  }
}

void Raster::line(int32_t x0, int32_t y0, int32_t x1, int32_t y1, Colour colour) {
  const int32_t columns = std::max(x1 - x0, 1);
  for (int32_t column = 0; column < columns; ++column) {
    const int32_t from = y0 + (y1 - y0) * column / columns;
    const int32_t to = y0 + (y1 - y0) * (column + 1) / columns;
    fill(x0 + column, std::min(from, to) - 1, 2, std::abs(to - from) + 2, colour);
  }
}

void Raster::write(int32_t x, int32_t y, std::string_view text, Colour colour) {
  for (const char character : text) {
    const auto small = static_cast<char>(std::tolower(static_cast<unsigned char>(character)));
    const auto* glyph = std::find_if(kGlyphs.begin(), kGlyphs.end(),
                                     [&](const Glyph& candidate) { return candidate.character == small; });
    for (int32_t row = 0; glyph != kGlyphs.end() && row < kGlyphHeight; ++row) {
      for (int32_t column = 0; column < kGlyphWidth; ++column) {
        const bool inked = (glyph->rows[static_cast<size_t>(row)] >> (kGlyphWidth - 1 - column) & 1) != 0;
        if (inked) fill(x + column * kDot, y + row * kDot, kDot, kDot, colour);
      }
    }
    x += kTextWidth;
  }
}

void Raster::write_png(const std::string& path) const {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(width_);
  image.height = static_cast<png_uint_32>(height_);
  image.format = PNG_FORMAT_RGB;
  if (png_image_write_to_file(&image, path.c_str(), 0, pixels_.data(), 0, nullptr) == 0) {
    throw Error(ErrorCode::unavailable, "--png", path, fmt::format("a file that can be written ({})", image.message));
  }
}

}  // namespace qkv::tools
