// Which tiles hold no visible pair, and which hold visible pairs only: interval arithmetic over the program. A truth is
// an interval too, [0, 0], [1, 1] or the unknown [0, 1], so that & is the minimum and | the maximum (Kleene logic).
// The bounds enclose every value that a pair of the tile can take, hence empty and full are proofs.
#include <algorithm>
#include <limits>

#include "core/checks.hpp"
#include "mask/program.hpp"
#include "mask/scene.hpp"

namespace qkv {
namespace mask {
namespace {

struct Interval {
  int64_t low = 0;
  int64_t high = 0;
};

constexpr Interval kUnknownOperand = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};

Interval truth_of(bool can_be_false, bool can_be_true) { return {can_be_false ? 0 : 1, can_be_true ? 1 : 0}; }

Interval combine(Opcode opcode, const Interval& a, const Interval& b) {
  switch (opcode) {
    case Opcode::add:
      return {a.low + b.low, a.high + b.high};
    case Opcode::subtract:
      return {a.low - b.high, a.high - b.low};
    case Opcode::less:
      return truth_of(a.high >= b.low, a.low < b.high);
    case Opcode::less_equal:
      return truth_of(a.high > b.low, a.low <= b.high);
    case Opcode::equal:
      return truth_of(a.low != a.high || b.low != b.high || a.low != b.low, a.low <= b.high && b.low <= a.high);
    case Opcode::negate:
      return {1 - a.high, 1 - a.low};
    case Opcode::both:
      return {std::min(a.low, b.low), std::min(a.high, b.high)};
    default:  // either
      return {std::max(a.low, b.low), std::max(a.high, b.high)};
  }
}

Interval bounds_of(const int32_t* values, int64_t begin, int64_t end) {
  int32_t low = std::numeric_limits<int32_t>::max();
  int32_t high = std::numeric_limits<int32_t>::min();
  for (int64_t i = begin; i < end; ++i) {
    low = std::min(low, values[i]);
    high = std::max(high, values[i]);
  }
  return {low, high};
}

bool reads_key(const Instruction& instruction) {
  return instruction.opcode == Opcode::kv_pos ||
         (instruction.opcode == Opcode::operand &&
          (instruction.scope == OperandScope::key || instruction.scope == OperandScope::new_key));
}

// Instructions that depend on the keys, in order.
std::vector<int32_t> find_key_dependent(const Program& program) {
  std::vector<int32_t> found;
  std::vector<bool> depends(program.code.size());
  for (size_t i = 0; i < program.code.size(); ++i) {
    const Instruction& instruction = program.code[i];
    depends[i] = reads_key(instruction) || (instruction.left >= 0 && depends[instruction.left]) ||
                 (instruction.right >= 0 && depends[instruction.right]);
    if (depends[i]) found.push_back(static_cast<int32_t>(i));
  }
  return found;
}

// Classes of key ranges against fixed queries and heads. What does not depend on the keys is bounded once.
class RowsClassifier {
 public:
  RowsClassifier(const Program& program, const ProgramInput& input, const std::vector<int32_t>& key_dependent,
                 const Tile& rows)
      : program_(program), input_(input), key_dependent_(key_dependent), intervals_(program.code.size()) {
    auto next_dependent = key_dependent.begin();
    for (size_t i = 0; i < program.code.size(); ++i) {
      if (next_dependent != key_dependent.end() && *next_dependent == static_cast<int32_t>(i)) {
        ++next_dependent;
      } else {
        intervals_[i] = row_interval(program.code[i], rows);
      }
    }
  }

  // Reading the operands of single keys costs a pass over them; without it they may be anything.
  TileClass classify(int32_t kv_begin, int32_t kv_end, bool reads_operands) {
    // Positions rise from key to key, so these enclose the tile's, and what is proved of them is proved of it.
    const int32_t first = input_.kv_pos(kv_begin);
    const int32_t end = input_.kv_pos(kv_end - 1) + 1;
    for (const int32_t i : key_dependent_) {
      intervals_[i] = key_interval(program_.code[i], first, end, reads_operands);
    }
    const Interval& truth = intervals_.back();
    return truth.low == 1 ? TileClass::full : truth.high == 0 ? TileClass::empty : TileClass::partial;
  }

 private:
  Interval row_interval(const Instruction& instruction, const Tile& rows) const {
    const int64_t context = int64_t{input_.kv_len} - input_.q_len;
    const auto exactly = [](int64_t value) { return Interval{value, value}; };
    switch (instruction.opcode) {
      case Opcode::constant:
      case Opcode::truth:
        return exactly(instruction.constant);
      case Opcode::q_pos:
        return {rows.query_begin + context, rows.query_end - 1 + context};
      case Opcode::q_head:
        return {rows.head_begin, int64_t{rows.head_end} - 1};
      case Opcode::request:
        return exactly(input_.request);
      case Opcode::q_len:
        return exactly(input_.q_len);
      case Opcode::kv_len:
        return exactly(input_.kv_len);
      case Opcode::operand:
        if (instruction.scope == OperandScope::request) return exactly(input_.operand[instruction.operand][0]);
        return bounds_of(input_.operand[instruction.operand], rows.query_begin, rows.query_end);
      default:
        return combine_operands(instruction);
    }
  }

  // Of the positions [kv_begin, kv_end).
  Interval key_interval(const Instruction& instruction, int32_t kv_begin, int32_t kv_end, bool reads_operands) const {
    if (instruction.opcode == Opcode::kv_pos) return {kv_begin, int64_t{kv_end} - 1};
    if (instruction.opcode != Opcode::operand) return combine_operands(instruction);
    const int64_t context = int64_t{input_.kv_len} - input_.q_len;
    const bool is_new_key = instruction.scope == OperandScope::new_key;
    if (is_new_key && kv_end <= context) return {0, 0};
    if (!reads_operands) return kUnknownOperand;
    const int32_t* values = input_.operand[instruction.operand];
    if (!is_new_key) return bounds_of(values, kv_begin, kv_end);
    Interval bounds = bounds_of(values, std::max<int64_t>(kv_begin - context, 0), kv_end - context);
    if (kv_begin < context) bounds = {std::min<int64_t>(bounds.low, 0), std::max<int64_t>(bounds.high, 0)};
    return bounds;
  }

  Interval combine_operands(const Instruction& instruction) const {
    const Interval& left = intervals_[instruction.left];
    return combine(instruction.opcode, left, instruction.right >= 0 ? intervals_[instruction.right] : left);
  }

  const Program& program_;
  const ProgramInput& input_;
  const std::vector<int32_t>& key_dependent_;
  std::vector<Interval> intervals_;
};

// Where operands of single queries change, their bounds over all queries say little: a span that half of the queries
// have would keep every key between "no span" and its end. So the queries are cut where an operand changes, and a class
// is proved for all of them if it is proved for each part.
class Classifier {
 public:
  static constexpr size_t kMaxParts = 8;

  Classifier(const Program& program, const ProgramInput& input, const Tile& rows)
      : key_dependent_(find_key_dependent(program)) {
    std::vector<int32_t> starts = find_changes(program, input, rows);
    starts.push_back(rows.query_end);
    const size_t num_runs = starts.size() - 1;
    const size_t runs_per_part = (num_runs + kMaxParts - 1) / kMaxParts;
    for (size_t run = 0; run < num_runs; run += runs_per_part) {
      Tile part = rows;
      part.query_begin = starts[run];
      part.query_end = starts[std::min(run + runs_per_part, num_runs)];
      parts_.emplace_back(program, input, key_dependent_, part);
    }
  }
  Classifier(const Classifier&) = delete;

  TileClass classify(int32_t kv_begin, int32_t kv_end, bool reads_operands) {
    const TileClass first = parts_[0].classify(kv_begin, kv_end, reads_operands);
    for (size_t i = 1; i < parts_.size() && first != TileClass::partial; ++i) {
      if (parts_[i].classify(kv_begin, kv_end, reads_operands) != first) return TileClass::partial;
    }
    return first;
  }

 private:
  // The first query of each run of equal operands.
  static std::vector<int32_t> find_changes(const Program& program, const ProgramInput& input, const Tile& rows) {
    std::vector<int32_t> starts{rows.query_begin};
    for (const Instruction& instruction : program.code) {
      if (instruction.opcode != Opcode::operand || instruction.scope != OperandScope::query) continue;
      const int32_t* values = input.operand[instruction.operand];
      for (int32_t query = rows.query_begin + 1; query < rows.query_end; ++query) {
        if (values[query] != values[query - 1]) starts.push_back(query);
      }
    }
    std::sort(starts.begin(), starts.end());
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
    return starts;
  }

  std::vector<int32_t> key_dependent_;
  std::vector<RowsClassifier> parts_;
};

bool has_no_pair(const Tile& tile) {
  return tile.query_begin >= tile.query_end || tile.kv_begin >= tile.kv_end || tile.head_begin >= tile.head_end;
}

// Cuts a range of tiles in halves until each is of one class. Only a single tile reads the operands of its keys, so
// that the cost of reading does not grow with the depth.
class Bisection {
 public:
  Bisection(Classifier& classifier, const Tile& range, int32_t tile_kv, std::vector<KeySegment>& segments)
      : classifier_(classifier), range_(range), tile_kv_(tile_kv), segments_(segments), first_(segments.size()) {}

  void run() { append(range_.kv_begin / tile_kv_, (int64_t{range_.kv_end} + tile_kv_ - 1) / tile_kv_); }

 private:
  void append(int64_t tile_begin, int64_t tile_end) {
    const auto begin = static_cast<int32_t>(std::max<int64_t>(tile_begin * tile_kv_, range_.kv_begin));
    const auto end = static_cast<int32_t>(std::min<int64_t>(tile_end * tile_kv_, range_.kv_end));
    const bool is_single = tile_end - tile_begin == 1;
    const TileClass tile_class = classifier_.classify(begin, end, is_single);
    if (tile_class == TileClass::empty) return;
    if (tile_class == TileClass::partial && !is_single) {
      const int64_t middle = tile_begin + (tile_end - tile_begin) / 2;
      append(tile_begin, middle);
      append(middle, tile_end);
      return;
    }
    const bool continues =
        segments_.size() > first_ && segments_.back().end == begin && segments_.back().tile_class == tile_class;
    if (continues) {
      segments_.back().end = end;
    } else {
      segments_.push_back({begin, end, tile_class});
    }
  }

  Classifier& classifier_;
  const Tile& range_;
  const int32_t tile_kv_;
  std::vector<KeySegment>& segments_;
  const size_t first_;  // earlier segments belong to other rows
};

}  // namespace

TileClass classify(const Program& program, const ProgramInput& input, const Tile& tile) {
  if (has_no_pair(tile)) return TileClass::empty;
  return Classifier(program, input, tile).classify(tile.kv_begin, tile.kv_end, true);
}

// Along the keys, all values rise or fall: a comparison's class changes twice, an equality's four times, in each part
// of the queries; and once more at a last tile that is shorter.
int32_t max_segments(const Program& program) {
  int32_t changes = 0;
  bool has_query_operand = false;
  for (const Instruction& instruction : program.code) {
    const bool is_operand = instruction.opcode == Opcode::operand;
    if (is_operand && reads_key(instruction)) return std::numeric_limits<int32_t>::max();
    has_query_operand |= is_operand && instruction.scope == OperandScope::query;
    if (instruction.opcode == Opcode::less || instruction.opcode == Opcode::less_equal) changes += 2;
    if (instruction.opcode == Opcode::equal) changes += 4;
  }
  return 2 + changes * (has_query_operand ? static_cast<int32_t>(Classifier::kMaxParts) : 1);
}

void append_segments(const Program& program, const ProgramInput& input, Tile range, int32_t tile_kv,
                     std::vector<KeySegment>& segments) {
  if (has_no_pair(range)) return;
  Classifier classifier(program, input, range);
  Bisection(classifier, range, tile_kv, segments).run();
}

}  // namespace mask

std::string_view to_string(TileClass tile_class) {
  switch (tile_class) {
    case TileClass::empty:
      return "empty";
    case TileClass::partial:
      return "partial";
    case TileClass::full:
      return "full";
  }
  return "unknown";
}

TileClass classify_tile(const Mask& mask, const MaskScene& scene, int32_t query_begin, int32_t query_end,
                        int32_t kv_begin, int32_t kv_end) {
  const mask::Program program = mask::compile(mask);
  const mask::ProgramInput input = mask::bind_scene(program.operands, scene);
  const auto check = [](const char* name, int32_t begin, int32_t end, int32_t length) {
    if (begin < 0 || end > length || begin > end) {
      refuse(name, fmt::format("[{}, {})", begin, end), fmt::format("a range within [0, {})", length));
    }
  };
  check("queries", query_begin, query_end, scene.q_len);
  check("keys", kv_begin, kv_end, scene.kv_len);
  return mask::classify(program, input, {query_begin, query_end, kv_begin, kv_end, scene.q_head, scene.q_head + 1});
}

}  // namespace qkv
