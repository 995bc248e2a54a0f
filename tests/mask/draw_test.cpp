// Pictures: characters exactly, PNG files by their pixels.
#include <png.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "scene_of.hpp"

namespace qkv::test {
namespace {

TEST(DrawText, a_character_a_pair) {
  EXPECT_EQ(draw_mask_text(mask::causal(), scene_of(3, 5)),
            "###..\n"
            "####.\n"
            "#####\n");
  EXPECT_EQ(draw_mask_text(mask::causal(), scene_of(0, 5)), "");
}

TEST(DrawText, tiles_show_their_class) {
  EXPECT_EQ(draw_mask_text(mask::causal() & mask::window(3, 0), scene_of(6, 9), 3, 4),
            "+----+---- -\n"
            "|####|....|.\n"
            "|.###|#...|.\n"
            "|..##|##..|.\n"
            "+----+----+-\n"
            "|...#|###.|.\n"
            "|....|####|.\n"
            "|....|.###|#\n");
  EXPECT_EQ(draw_mask_text(mask::everything(), scene_of(1, 3), 0, 2),
            "=--=-\n"
            "|##|#\n");
}

TEST(DrawText, negative_tiles_are_refused) {
  expect_refused([] { draw_mask_text(mask::causal(), scene_of(2, 2), -1, 2); }, "tile_q: got -1");
  expect_refused([] { draw_mask_png(mask::causal(), scene_of(2, 2), "/nowhere.png", 2, -1); }, "tile_kv: got -1");
}

struct Picture {
  explicit Picture(const std::string& path) {
    png_image image{};
    image.version = PNG_IMAGE_VERSION;
    if (png_image_begin_read_from_file(&image, path.c_str()) == 0) return;
    image.format = PNG_FORMAT_GRAY;
    width = image.width;
    height = image.height;
    grey.resize(PNG_IMAGE_SIZE(image));
    png_image_finish_read(&image, nullptr, grey.data(), 0, nullptr);
  }
  // Share of pixels darker than a visible pair's lightest tint.
  double dark_share() const {
    size_t dark = 0;
    for (const uint8_t value : grey) dark += value < 120 ? 1 : 0;
    return static_cast<double>(dark) / static_cast<double>(grey.size());
  }
  size_t width = 0;
  size_t height = 0;
  std::vector<uint8_t> grey;
};

Picture draw(const Mask& mask, const MaskScene& scene, int32_t tile_q, int32_t tile_kv) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("qkv_draw_" + std::to_string(getpid()) + ".png")).string();
  draw_mask_png(mask, scene, path, tile_q, tile_kv);
  Picture picture(path);
  std::filesystem::remove(path);
  return picture;
}

TEST(DrawPng, small_masks_have_large_pairs) {
  const Picture picture = draw(mask::causal(), scene_of(12, 12), 4, 4);
  EXPECT_GT(picture.width, 300u);
  EXPECT_LT(picture.width, 700u);
}

TEST(DrawPng, large_masks_are_scaled_down) {
  const Picture half = draw(mask::causal(), scene_of(40000, 40000), 64, 128);
  EXPECT_GT(half.width, 1200u);
  EXPECT_LT(half.width, 1600u);
  EXPECT_LT(half.height, 1600u);
  EXPECT_NEAR(half.dark_share(), 0.43, 0.05);  // half of the plot, which leaves room for margins
  EXPECT_LT(draw(mask::nothing(), scene_of(40000, 40000), 64, 128).dark_share(), 0.02);
  EXPECT_GT(draw(mask::everything(), scene_of(40000, 40000), 64, 128).dark_share(), 0.8);
}

TEST(DrawPng, decode_rows_stay_visible) {
  const Picture picture = draw(mask::everything(), scene_of(1, 100000), 0, 0);
  EXPECT_GT(picture.dark_share(), 0.1);
}

TEST(DrawPng, requests_without_pairs_can_be_drawn) {
  for (const auto& [q_len, kv_len] : {std::pair{0, 0}, {0, 5}, {5, 0}}) {
    EXPECT_GT(draw(mask::causal(), scene_of(q_len, kv_len), 2, 2).width, 0u);
    EXPECT_GT(draw(mask::causal(), scene_of(q_len, kv_len), 0, 0).width, 0u);
  }
}

TEST(DrawPng, unwritable_paths_are_refused) {
  try {
    draw_mask_png(mask::causal(), scene_of(2, 2), "/no/such/folder/mask.png");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    EXPECT_EQ(error.argument(), "path");
  }
}

}  // namespace
}  // namespace qkv::test
