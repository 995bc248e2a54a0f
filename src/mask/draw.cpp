// Pictures of masks: characters for a terminal, a PNG for everything larger.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/checks.hpp"
#include "mask/program.hpp"
#include "mask/scene.hpp"
#include "qkv/canvas.hpp"

namespace qkv {
namespace mask {
namespace {

// The whole request seen by one head.
struct View {
  View(const Mask& mask, const MaskScene& scene)
      : program(compile(mask)), input(bind_scene(program.operands, scene)), q_head(scene.q_head) {}

  // Classes of the tiles of these queries, a tile of `tile_kv` keys each.
  std::vector<TileClass> tile_row(int32_t query_begin, int32_t query_end, int32_t tile_kv) const {
    std::vector<TileClass> classes((int64_t{input.kv_len} + tile_kv - 1) / tile_kv, TileClass::empty);
    for (const KeySegment& segment : segments(query_begin, query_end, tile_kv)) {
      for (int64_t key = segment.begin; key < segment.end; key += tile_kv) classes[key / tile_kv] = segment.tile_class;
    }
    return classes;
  }

  std::vector<KeySegment> segments(int32_t query_begin, int32_t query_end, int32_t tile_kv) const {
    std::vector<KeySegment> found;
    append_segments(program, input, {query_begin, query_end, 0, input.kv_len, q_head, q_head + 1}, tile_kv, found);
    return found;
  }

  Program program;
  ProgramInput input;
  int32_t q_head;
};

// 0 = no tiles on this axis, that is, one that spans it.
int32_t checked_tile(const char* name, int32_t tile, int32_t length) {
  if (tile < 0) refuse(name, tile, "0 (no tiles) or more");
  return tile == 0 ? std::max(length, 1) : tile;
}

// --- PNG ---

constexpr int32_t kPlotPixels = 1400;  // of the longer axis, at most
constexpr int32_t kComfortablePixels = 960;
constexpr int32_t kMaxCellPixels = 28;
constexpr int32_t kMinPlotPixels = 56;
constexpr int32_t kMargin = 24;
constexpr int32_t kTickPixels = 6;

constexpr Colour kPaper = {255, 255, 255};
constexpr Colour kInk = {71, 80, 94};
constexpr Colour kGrid = {178, 186, 198};

// Background and visible pair.
struct Tint {
  Colour hidden;
  Colour visible;
};

Tint tint_of(TileClass tile_class) {
  switch (tile_class) {
    case TileClass::empty:
      return {{240, 242, 245}, {240, 242, 245}};
    case TileClass::partial:
      return {{252, 232, 200}, {163, 73, 22}};
    default:
      return {{205, 230, 222}, {22, 94, 92}};
  }
}

constexpr Tint kPlain = {{240, 242, 245}, {35, 62, 104}};

// One side of the plot: cells of one or more positions, each of one or more pixels.
struct Axis {
  int32_t length;
  int32_t positions_per_cell;
  int32_t cell_pixels;

  int32_t num_cells() const {
    return static_cast<int32_t>((int64_t{length} + positions_per_cell - 1) / positions_per_cell);
  }
  int32_t pixels() const { return std::max(num_cells() * cell_pixels, 1); }
  int32_t pixel_of(int64_t position) const { return static_cast<int32_t>(position * cell_pixels / positions_per_cell); }
};

Axis axis_of(int32_t length, int32_t longest) {
  const auto fit = [](int32_t count, int32_t pixels) {
    return std::clamp(pixels / std::max(count, 1), 1, kMaxCellPixels);
  };
  if (longest <= kPlotPixels) {
    const Axis axis{length, 1, fit(longest, kComfortablePixels)};
    if (axis.pixels() >= kMinPlotPixels) return axis;
    return {length, 1, std::max(axis.cell_pixels, fit(length, kMinPlotPixels))};
  }
  const Axis axis{length, (longest - 1) / kPlotPixels + 1, 1};
  if (axis.pixels() >= kMinPlotPixels) return axis;
  // Few queries against many keys: a square scale would leave a line.
  return {length, (std::max(length, 1) - 1) / kMinPlotPixels + 1, fit(length, kMinPlotPixels)};
}

// Positions between labels, the fewest that leave room for them: 1, 2, 5, 10, … or tile·{1, 2, 4, 8, …}.
int64_t tick_step(const Axis& axis, int32_t tile, int32_t min_pixels) {
  int64_t step = std::max(tile, 1);
  for (int32_t i = 0; axis.pixel_of(step) < min_pixels && step <= axis.length; ++i) {
    step = tile > 0 ? step * 2 : i % 3 == 1 ? step / 2 * 5 : step * 2;
  }
  return step;
}

class Picture {
 public:
  Picture(const View& view, int32_t tile_q, int32_t tile_kv)
      : view_(view),
        has_tiles_(tile_q > 0 || tile_kv > 0),
        tile_q_(checked_tile("tile_q", tile_q, view.input.q_len)),
        tile_kv_(checked_tile("tile_kv", tile_kv, view.input.kv_len)),
        tick_q_(tile_q),
        tick_kv_(tile_kv),
        queries_(axis_of(view.input.q_len, std::max(view.input.q_len, view.input.kv_len))),
        keys_(axis_of(view.input.kv_len, std::max(view.input.q_len, view.input.kv_len))),
        left_(kMargin + label_width() + kTickPixels + 4),
        top_(kMargin + 2 * Canvas::kTextHeight + 14 + kTickPixels),
        canvas_(std::max(left_ + keys_.pixels(), kMargin + legend_width()) + kMargin + 12,
                top_ + queries_.pixels() + 2 * kMargin + Canvas::kTextHeight + 6, kPaper) {}

  Canvas draw() && {
    draw_pairs();
    if (has_tiles_) draw_grid();
    draw_frame();
    draw_ticks();
    draw_legend();
    return std::move(canvas_);
  }

 private:
  int64_t context() const { return int64_t{view_.input.kv_len} - view_.input.q_len; }

  int32_t label_width() const {
    const size_t first = std::to_string(context()).size();
    const size_t last = std::to_string(view_.input.kv_len).size();
    return static_cast<int32_t>(std::max({first, last, size_t{5}})) * Canvas::kTextWidth;
  }

  void draw_pairs() {
    int32_t tile_row = -1;
    std::vector<TileClass> classes;
    for (int32_t row = 0; row < queries_.num_cells(); ++row) {
      const int32_t query_begin = row * queries_.positions_per_cell;
      const int32_t query_end = std::min(query_begin + queries_.positions_per_cell, queries_.length);
      if (query_begin / tile_q_ != tile_row) {
        tile_row = query_begin / tile_q_;
        const int64_t begin = int64_t{tile_row} * tile_q_;
        const int64_t end = std::min<int64_t>(begin + tile_q_, queries_.length);
        classes = view_.tile_row(static_cast<int32_t>(begin), static_cast<int32_t>(end), tile_kv_);
      }
      const std::vector<double> shares = visible_shares(query_begin, query_end);
      for (int32_t column = 0; column < keys_.num_cells(); ++column) {
        const int64_t key = int64_t{column} * keys_.positions_per_cell;
        draw_cell(row, column, has_tiles_ ? tint_of(classes[key / tile_kv_]) : kPlain, shares[column]);
      }
    }
  }

  // A gap between large cells lets pairs be counted and the tile's tint be seen.
  void draw_cell(int32_t row, int32_t column, const Tint& tint, double share) {
    const int32_t x = left_ + column * keys_.cell_pixels;
    const int32_t y = top_ + row * queries_.cell_pixels;
    const auto gap = [](int32_t pixels) { return pixels >= 14 ? 2 : pixels >= 6 ? 1 : 0; };
    const int32_t gap_x = gap(keys_.cell_pixels);
    const int32_t gap_y = gap(queries_.cell_pixels);
    canvas_.fill(x, y, keys_.cell_pixels, queries_.cell_pixels, tint.hidden);
    if (share == 0) return;
    canvas_.fill(x + gap_x, y + gap_y, keys_.cell_pixels - 2 * gap_x + 1, queries_.cell_pixels - 2 * gap_y + 1,
                 mix(tint.hidden, tint.visible, 0.25 + 0.75 * share));
  }

  // The share of visible pairs in each cell of these queries. Cells are the tiles of the search, so a full run needs no
  // look at its pairs.
  std::vector<double> visible_shares(int32_t query_begin, int32_t query_end) {
    const int32_t keys_per_cell = keys_.positions_per_cell;
    std::vector<double> shares(keys_.num_cells());
    for (const KeySegment& segment : view_.segments(query_begin, query_end, keys_per_cell)) {
      for (int64_t begin = segment.begin; begin < segment.end; begin += keys_per_cell) {
        const auto end = static_cast<int32_t>(std::min<int64_t>(begin + keys_per_cell, segment.end));
        const bool is_full = segment.tile_class == TileClass::full;
        shares[begin / keys_per_cell] =
            is_full ? 1 : visible_share(query_begin, query_end, static_cast<int32_t>(begin), end);
      }
    }
    return shares;
  }

  double visible_share(int32_t query_begin, int32_t query_end, int32_t kv_begin, int32_t kv_end) {
    row_.resize(kv_end - kv_begin);
    int64_t count = 0;
    for (int32_t query = query_begin; query < query_end; ++query) {
      evaluate_row(view_.program, view_.input, query, view_.q_head, kv_begin, kv_end, row_.data(), scratch_);
      for (const int32_t visible : row_) count -= visible;
    }
    return static_cast<double>(count) / (static_cast<double>(query_end - query_begin) * (kv_end - kv_begin));
  }

  void draw_grid() {
    constexpr int32_t kMinTilePixels = 5;
    const auto lines = [](const Axis& axis, int32_t tile, const auto& draw_line) {
      if (axis.pixel_of(tile) < kMinTilePixels) return;
      for (int64_t position = tile; position < axis.length; position += tile) draw_line(axis.pixel_of(position));
    };
    lines(keys_, tile_kv_, [&](int32_t x) { canvas_.fill(left_ + x, top_, 1, queries_.pixels(), kGrid); });
    lines(queries_, tile_q_, [&](int32_t y) { canvas_.fill(left_, top_ + y, keys_.pixels(), 1, kGrid); });
  }

  void draw_frame() {
    canvas_.fill(left_ - 1, top_ - 1, keys_.pixels() + 2, 1, kInk);
    canvas_.fill(left_ - 1, top_ + queries_.pixels(), keys_.pixels() + 2, 1, kInk);
    canvas_.fill(left_ - 1, top_ - 1, 1, queries_.pixels() + 2, kInk);
    canvas_.fill(left_ + keys_.pixels(), top_ - 1, 1, queries_.pixels() + 2, kInk);
  }

  void draw_ticks() {
    const int32_t label_y = top_ - kTickPixels - 6 - Canvas::kTextHeight;
    canvas_.write(left_, label_y - Canvas::kTextHeight - 10, "kv_pos", kInk);
    canvas_.write(kMargin, label_y, "q_pos", kInk);
    const int32_t key_label = static_cast<int32_t>(std::to_string(keys_.length).size() + 1) * Canvas::kTextWidth;
    const int64_t key_step = tick_step(keys_, tick_kv_, key_label);
    for (int64_t key = 0; key < keys_.length; key += key_step) {
      const int32_t x = left_ + keys_.pixel_of(key);
      canvas_.fill(x, top_ - 1 - kTickPixels, 1, kTickPixels, kInk);
      canvas_.write(x, label_y, std::to_string(key), kInk);
    }
    const int64_t query_step = tick_step(queries_, tick_q_, Canvas::kTextHeight + 8);
    for (int64_t query = 0; query < queries_.length; query += query_step) {
      const int32_t y = top_ + queries_.pixel_of(query);
      const std::string label = std::to_string(query + context());
      const int32_t width = static_cast<int32_t>(label.size()) * Canvas::kTextWidth;
      canvas_.fill(left_ - 1 - kTickPixels, y, kTickPixels, 1, kInk);
      canvas_.write(left_ - kTickPixels - 4 - width, y, label, kInk);
    }
  }

  struct LegendEntry {
    std::string_view text;
    Colour background;
    Colour colour;
  };

  std::vector<LegendEntry> legend() const {
    if (!has_tiles_) return {{"visible", kPlain.visible, kPlain.visible}, {"hidden", kPlain.hidden, kPlain.hidden}};
    const auto entry = [](std::string_view text, TileClass tile_class) {
      return LegendEntry{text, tint_of(tile_class).hidden, tint_of(tile_class).visible};
    };
    return {entry("full tile", TileClass::full), entry("partial tile", TileClass::partial),
            entry("empty tile", TileClass::empty)};
  }

  static constexpr int32_t kSwatch = 16;
  static constexpr int32_t kLegendGap = 22;

  int32_t legend_width() const {
    int32_t width = 0;
    for (const LegendEntry& entry : legend()) {
      width += kSwatch + 8 + static_cast<int32_t>(entry.text.size()) * Canvas::kTextWidth + kLegendGap;
    }
    return width;
  }

  void draw_legend() {
    int32_t x = std::min(left_, canvas_.width() - legend_width());
    const int32_t y = top_ + queries_.pixels() + kMargin;
    for (const LegendEntry& entry : legend()) {
      canvas_.fill(x - 1, y - 1, kSwatch + 2, kSwatch + 2, kGrid);
      canvas_.fill(x, y, kSwatch, kSwatch, entry.background);
      canvas_.fill(x + 4, y + 4, kSwatch - 8, kSwatch - 8, entry.colour);
      canvas_.write(x + kSwatch + 8, y + 1, entry.text, kInk);
      x += kSwatch + 8 + static_cast<int32_t>(entry.text.size()) * Canvas::kTextWidth + kLegendGap;
    }
  }

  const View& view_;
  bool has_tiles_;
  int32_t tile_q_;
  int32_t tile_kv_;
  int32_t tick_q_;
  int32_t tick_kv_;
  Axis queries_;
  Axis keys_;
  int32_t left_;
  int32_t top_;
  Canvas canvas_;
  RowScratch scratch_;
  std::vector<int32_t> row_;
};

}  // namespace
}  // namespace mask

std::string draw_mask_text(const Mask& mask, const MaskScene& scene, int32_t tile_q, int32_t tile_kv) {
  const mask::View view(mask, scene);
  const bool has_tiles = tile_q > 0 || tile_kv > 0;
  const int32_t rows = mask::checked_tile("tile_q", tile_q, scene.q_len);
  const int32_t columns = mask::checked_tile("tile_kv", tile_kv, scene.kv_len);
  mask::RowScratch scratch;
  std::vector<int32_t> visible(scene.kv_len);
  std::string text;
  for (int32_t query = 0; query < scene.q_len; ++query) {
    if (has_tiles && query % rows == 0) {
      int32_t begin = 0;
      const int32_t query_end = rows < scene.q_len - query ? query + rows : scene.q_len;
      for (const TileClass tile_class : view.tile_row(query, query_end, columns)) {
        text += tile_class == TileClass::empty ? ' ' : tile_class == TileClass::partial ? '+' : '=';
        text.append(std::min(columns, scene.kv_len - begin), '-');
        begin += columns;
      }
      text += '\n';
    }
    mask::evaluate_row(view.program, view.input, query, scene.q_head, 0, scene.kv_len, visible.data(), scratch);
    for (int32_t key = 0; key < scene.kv_len; ++key) {
      if (has_tiles && key % columns == 0) text += '|';
      text += visible[key] != 0 ? '#' : '.';
    }
    text += '\n';
  }
  return text;
}

void draw_mask_png(const Mask& mask, const MaskScene& scene, const std::string& path, int32_t tile_q, int32_t tile_kv) {
  constexpr int64_t kMaxPairs = int64_t{1} << 31;  // some ten seconds
  if (scene.q_len > 0 && scene.kv_len > kMaxPairs / scene.q_len) {
    refuse("scene", fmt::format("{} queries and {} keys", scene.q_len, scene.kv_len),
           fmt::format("at most {} pairs of them: each is looked at", kMaxPairs));
  }
  const mask::View view(mask, scene);
  mask::Picture(view, tile_q, tile_kv).draw().write_png(path);
}

}  // namespace qkv
