// A row of keys at once; is_visible's answer for each. Without operands of single keys every value of a row is
// linear in the key's index, so a comparison is a run of keys and a whole causal or window row costs one fill. Only
// operands of single keys and gaps need lanes: 32-bit ones where the bounds of both sides prove that they fit, else
// 64-bit ones.
#include <algorithm>
#include <limits>

#include "mask/program.hpp"

namespace qkv::mask {
namespace {

bool fits_narrow(const RowValue& value) {
  return value.low >= std::numeric_limits<int32_t>::min() && value.high <= std::numeric_limits<int32_t>::max();
}

int64_t divide_down(int64_t a, int64_t positive) {
  const int64_t quotient = a / positive;
  return quotient - (a % positive < 0 ? 1 : 0);
}

// The loops. Restricted pointers and plain bodies, so that the compiler vectorises them.
template <typename T>
void compare_lanes(Opcode opcode, const T* __restrict a, const T* __restrict b, int32_t count,
                   int32_t* __restrict out) {
  if (opcode == Opcode::less) {
    for (int32_t k = 0; k < count; ++k) out[k] = -static_cast<int32_t>(a[k] < b[k]);
  } else if (opcode == Opcode::less_equal) {
    for (int32_t k = 0; k < count; ++k) out[k] = -static_cast<int32_t>(a[k] <= b[k]);
  } else {
    for (int32_t k = 0; k < count; ++k) out[k] = -static_cast<int32_t>(a[k] == b[k]);
  }
}

template <typename T>
void sum_lanes(Opcode opcode, const T* __restrict a, const T* __restrict b, int32_t count, T* __restrict out) {
  if (opcode == Opcode::add) {
    for (int32_t k = 0; k < count; ++k) out[k] = a[k] + b[k];
  } else {
    for (int32_t k = 0; k < count; ++k) out[k] = a[k] - b[k];
  }
}

void join_lanes(Opcode opcode, const int32_t* __restrict a, const int32_t* __restrict b, int32_t count,
                int32_t* __restrict out) {
  if (opcode == Opcode::both) {
    for (int32_t k = 0; k < count; ++k) out[k] = a[k] & b[k];
  } else {
    for (int32_t k = 0; k < count; ++k) out[k] = a[k] | b[k];
  }
}

class RowEvaluator {
 public:
  RowEvaluator(const Program& program, const ProgramInput& input, int32_t query, int32_t q_head, int32_t kv_begin,
               int32_t count, int32_t* visible, RowScratch& scratch)
      : code_(program.code),
        input_(input),
        query_(query),
        q_head_(q_head),
        kv_begin_(kv_begin),
        count_(count),
        visible_(visible),
        scratch_(scratch) {
    if (scratch_.values.size() < code_.size()) scratch_.values.resize(code_.size());
    const size_t lanes = code_.size() * static_cast<size_t>(count);
    if (scratch_.narrow.size() < lanes) scratch_.narrow.resize(lanes);
  }

  void run() {
    const size_t last = code_.size() - 1;
    for (size_t i = 0; i <= last; ++i) step(i);
    const RowValue& truth = scratch_.values[last];
    if (!truth.is_lanes) {
      fill_run(truth, visible_);
    } else if (truth.narrow != visible_) {
      std::copy_n(truth.narrow, count_, visible_);
    }
  }

 private:
  void step(size_t i) {
    const Instruction& instruction = code_[i];
    switch (instruction.opcode) {
      case Opcode::constant:
        return set_linear(i, instruction.constant, 0);
      case Opcode::q_pos:
        return set_linear(i, int64_t{query_} + input_.kv_len - input_.q_len, 0);
      case Opcode::kv_pos:
        return set_positions(i);
      case Opcode::q_head:
        return set_linear(i, q_head_, 0);
      case Opcode::request:
        return set_linear(i, input_.request, 0);
      case Opcode::q_len:
        return set_linear(i, input_.q_len, 0);
      case Opcode::kv_len:
        return set_linear(i, input_.kv_len, 0);
      case Opcode::operand:
        return set_operand(i, instruction);
      case Opcode::add:
      case Opcode::subtract:
        return set_sum(i, instruction);
      case Opcode::less:
      case Opcode::less_equal:
      case Opcode::equal:
        return set_comparison(i, instruction);
      case Opcode::truth:
        return set_run(i, 0, instruction.constant != 0 ? count_ : 0);
      case Opcode::negate:
        return set_negation(i, instruction);
      case Opcode::both:
        return set_both(i, instruction);
      case Opcode::either:
        return set_either(i, instruction);
    }
  }

  void set_linear(size_t i, int64_t base, int64_t slope) {
    RowValue& value = scratch_.values[i];
    const int64_t last = base + slope * (count_ - 1);
    value.base = base;
    value.slope = slope;
    value.low = std::min(base, last);
    value.high = std::max(base, last);
    value.is_lanes = false;
    value.narrow = nullptr;
    value.wide = nullptr;
  }

  void set_lanes(size_t i, const int32_t* narrow, const int64_t* wide, int64_t low, int64_t high) {
    RowValue& value = scratch_.values[i];
    value.low = low;
    value.high = high;
    value.is_lanes = true;
    value.narrow = narrow;
    value.wide = wide;
  }

  void set_run(size_t i, int64_t begin, int64_t end) {
    RowValue& value = scratch_.values[i];
    value.begin = static_cast<int32_t>(std::clamp<int64_t>(begin, 0, count_));
    value.end = static_cast<int32_t>(std::clamp<int64_t>(end, value.begin, count_));
    value.is_lanes = false;
    value.narrow = nullptr;
  }

  void set_truth_lanes(size_t i, const int32_t* lanes) {
    scratch_.values[i].is_lanes = true;
    scratch_.values[i].narrow = lanes;
  }

  void set_positions(size_t i) {
    const int32_t first = input_.kv_pos(kv_begin_);
    const int32_t stride = input_.keys.stride();
    if (stride != 0) return set_linear(i, first, stride);
    int32_t* lanes = narrow_buffer(i);
    for (int32_t k = 0; k < count_; ++k) lanes[k] = input_.kv_pos(kv_begin_ + k);
    set_lanes(i, lanes, nullptr, first, lanes[count_ - 1]);
  }

  // Values that lie at the keys' positions, from `first` on; 0 before it.
  void set_looked_up(size_t i, const int32_t* values, int64_t first) {
    constexpr int64_t kLow = std::numeric_limits<int32_t>::min();
    constexpr int64_t kHigh = std::numeric_limits<int32_t>::max();
    int32_t* lanes = narrow_buffer(i);
    for (int32_t k = 0; k < count_; ++k) {
      const int64_t position = input_.kv_pos(kv_begin_ + k);
      lanes[k] = position < first ? 0 : values[position - first];
    }
    set_lanes(i, lanes, nullptr, kLow, kHigh);
  }

  void set_operand(size_t i, const Instruction& instruction) {
    const int32_t* values = input_.operand[instruction.operand];
    if (instruction.scope == OperandScope::request) return set_linear(i, values[0], 0);
    if (instruction.scope == OperandScope::query) return set_linear(i, values[query_], 0);
    const int64_t first = instruction.scope == OperandScope::key ? 0 : int64_t{input_.kv_len} - input_.q_len;
    const int64_t begin = input_.kv_pos(kv_begin_) - first;
    const int64_t last = input_.kv_pos(kv_begin_ + count_ - 1) - first;
    if (last < 0) return set_linear(i, 0, 0);
    const bool is_row = begin >= 0 && last - begin == count_ - 1;  // the values stand one beside another
    if (!is_row) return set_looked_up(i, values, first);
    constexpr int64_t kLow = std::numeric_limits<int32_t>::min();
    constexpr int64_t kHigh = std::numeric_limits<int32_t>::max();
    set_lanes(i, values + begin, nullptr, kLow, kHigh);
  }

  void set_sum(size_t i, const Instruction& instruction) {
    const RowValue& a = scratch_.values[instruction.left];
    const RowValue& b = scratch_.values[instruction.right];
    const bool is_add = instruction.opcode == Opcode::add;
    if (!a.is_lanes && !b.is_lanes) {
      return is_add ? set_linear(i, a.base + b.base, a.slope + b.slope)
                    : set_linear(i, a.base - b.base, a.slope - b.slope);
    }
    RowValue sum;
    sum.low = is_add ? a.low + b.low : a.low - b.high;
    sum.high = is_add ? a.high + b.high : a.high - b.low;
    if (fits_narrow(a) && fits_narrow(b) && fits_narrow(sum)) {
      sum_lanes(instruction.opcode, narrow_lanes(instruction.left), narrow_lanes(instruction.right), count_,
                narrow_buffer(i));
      return set_lanes(i, narrow_buffer(i), nullptr, sum.low, sum.high);
    }
    sum_lanes(instruction.opcode, wide_lanes(instruction.left), wide_lanes(instruction.right), count_, wide_buffer(i));
    set_lanes(i, nullptr, wide_buffer(i), sum.low, sum.high);
  }

  void set_comparison(size_t i, const Instruction& instruction) {
    const RowValue& a = scratch_.values[instruction.left];
    const RowValue& b = scratch_.values[instruction.right];
    const Opcode opcode = instruction.opcode;
    if (!a.is_lanes && !b.is_lanes) return set_linear_comparison(i, opcode, a.base - b.base, a.slope - b.slope);
    if (fits_narrow(a) && fits_narrow(b)) {
      compare_lanes(opcode, narrow_lanes(instruction.left), narrow_lanes(instruction.right), count_, truth_buffer(i));
    } else {
      compare_lanes(opcode, wide_lanes(instruction.left), wide_lanes(instruction.right), count_, truth_buffer(i));
    }
    set_truth_lanes(i, truth_buffer(i));
  }

  // The run of k with base + slope·k < 0 (<= 0, == 0).
  void set_linear_comparison(size_t i, Opcode opcode, int64_t base, int64_t slope) {
    if (slope == 0) {
      const bool truth = opcode == Opcode::less ? base < 0 : opcode == Opcode::less_equal ? base <= 0 : base == 0;
      return set_run(i, 0, truth ? count_ : 0);
    }
    if (opcode == Opcode::equal) {
      const int64_t k = -base / slope;
      const bool is_hit = k * slope == -base && k >= 0 && k < count_;
      return is_hit ? set_run(i, k, k + 1) : set_run(i, 0, 0);
    }
    const int64_t bound = opcode == Opcode::less ? base + 1 : base;  // bound + slope·k <= 0
    if (slope > 0) return set_run(i, 0, divide_down(-bound, slope) + 1);
    set_run(i, -divide_down(-bound, -slope), count_);
  }

  void set_negation(size_t i, const Instruction& instruction) {
    const RowValue& a = scratch_.values[instruction.left];
    if (!a.is_lanes && a.begin == a.end) return set_run(i, 0, count_);
    if (!a.is_lanes && a.begin == 0) return set_run(i, a.end, count_);
    if (!a.is_lanes && a.end == count_) return set_run(i, 0, a.begin);
    const int32_t* __restrict lanes = truth_lanes(instruction.left);
    int32_t* __restrict out = truth_buffer(i);
    for (int32_t k = 0; k < count_; ++k) out[k] = ~lanes[k];
    set_truth_lanes(i, out);
  }

  void set_both(size_t i, const Instruction& instruction) {
    const RowValue& a = scratch_.values[instruction.left];
    const RowValue& b = scratch_.values[instruction.right];
    if (!a.is_lanes && !b.is_lanes) return set_run(i, std::max(a.begin, b.begin), std::min(a.end, b.end));
    if (is_empty(a) || is_empty(b)) return set_run(i, 0, 0);
    if (is_whole(a)) return set_truth_lanes(i, b.narrow);
    if (is_whole(b)) return set_truth_lanes(i, a.narrow);
    set_joined(i, instruction);
  }

  void set_either(size_t i, const Instruction& instruction) {
    const RowValue& a = scratch_.values[instruction.left];
    const RowValue& b = scratch_.values[instruction.right];
    if (is_whole(a) || is_whole(b)) return set_run(i, 0, count_);
    if (is_empty(a)) return copy_truth(i, b);
    if (is_empty(b)) return copy_truth(i, a);
    const bool touch = !a.is_lanes && !b.is_lanes && a.begin <= b.end && b.begin <= a.end;
    if (touch) return set_run(i, std::min(a.begin, b.begin), std::max(a.end, b.end));
    set_joined(i, instruction);
  }

  void set_joined(size_t i, const Instruction& instruction) {
    join_lanes(instruction.opcode, truth_lanes(instruction.left), truth_lanes(instruction.right), count_,
               truth_buffer(i));
    set_truth_lanes(i, truth_buffer(i));
  }

  void copy_truth(size_t i, const RowValue& from) {
    return from.is_lanes ? set_truth_lanes(i, from.narrow) : set_run(i, from.begin, from.end);
  }

  bool is_empty(const RowValue& truth) const { return !truth.is_lanes && truth.begin == truth.end; }
  bool is_whole(const RowValue& truth) const { return !truth.is_lanes && truth.begin == 0 && truth.end == count_; }

  int32_t* narrow_buffer(size_t i) { return scratch_.narrow.data() + i * static_cast<size_t>(count_); }
  // The mask's own truth goes straight to the caller.
  int32_t* truth_buffer(size_t i) { return i + 1 == code_.size() ? visible_ : narrow_buffer(i); }

  int64_t* wide_buffer(size_t i) {
    // Grown before the first wide lane of this row exists, so no lane moves.
    const size_t lanes = code_.size() * static_cast<size_t>(count_);
    if (scratch_.wide.size() < lanes) scratch_.wide.resize(lanes);
    return scratch_.wide.data() + i * static_cast<size_t>(count_);
  }

  const int32_t* narrow_lanes(size_t i) {
    RowValue& value = scratch_.values[i];
    if (value.narrow != nullptr) return value.narrow;
    int32_t* lanes = narrow_buffer(i);
    if (value.is_lanes) {
      for (int32_t k = 0; k < count_; ++k) lanes[k] = static_cast<int32_t>(value.wide[k]);
    } else {
      const auto base = static_cast<uint32_t>(value.base);  // the sum fits, slope·k alone may not
      const auto slope = static_cast<uint32_t>(value.slope);
      for (int32_t k = 0; k < count_; ++k) lanes[k] = static_cast<int32_t>(base + slope * static_cast<uint32_t>(k));
    }
    return value.narrow = lanes;
  }

  const int64_t* wide_lanes(size_t i) {
    RowValue& value = scratch_.values[i];
    if (value.wide != nullptr) return value.wide;
    int64_t* lanes = wide_buffer(i);
    if (value.is_lanes) {
      std::copy_n(value.narrow, count_, lanes);
    } else {
      for (int32_t k = 0; k < count_; ++k) lanes[k] = value.base + value.slope * k;
    }
    return value.wide = lanes;
  }

  const int32_t* truth_lanes(size_t i) {
    RowValue& truth = scratch_.values[i];
    if (truth.narrow == nullptr) {
      fill_run(truth, narrow_buffer(i));
      truth.narrow = narrow_buffer(i);
    }
    return truth.narrow;
  }

  void fill_run(const RowValue& run, int32_t* lanes) const {
    std::fill(lanes, lanes + run.begin, 0);
    std::fill(lanes + run.begin, lanes + run.end, -1);
    std::fill(lanes + run.end, lanes + count_, 0);
  }

  const std::vector<Instruction>& code_;
  const ProgramInput& input_;
  const int32_t query_;
  const int32_t q_head_;
  const int32_t kv_begin_;
  const int32_t count_;
  int32_t* const visible_;
  RowScratch& scratch_;
};

}  // namespace

void evaluate_row(const Program& program, const ProgramInput& input, int32_t query, int32_t q_head, int32_t kv_begin,
                  int32_t kv_end, int32_t* visible, RowScratch& scratch) {
  if (kv_end <= kv_begin) return;
  RowEvaluator(program, input, query, q_head, kv_begin, kv_end - kv_begin, visible, scratch).run();
}

}  // namespace qkv::mask
