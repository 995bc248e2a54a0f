#include "mask/emit.hpp"

#include <fmt/format.h>

#include <limits>

namespace qkv::mask {
namespace {

constexpr int64_t kIntMin = std::numeric_limits<int32_t>::min();
constexpr int64_t kIntMax = std::numeric_limits<int32_t>::max();

struct Bounds {
  int64_t low;
  int64_t high;
  bool fits_int() const { return low >= kIntMin && high <= kIntMax; }
};

bool is_truth(Opcode opcode) {
  switch (opcode) {
    case Opcode::less:
    case Opcode::less_equal:
    case Opcode::equal:
    case Opcode::truth:
    case Opcode::negate:
    case Opcode::both:
    case Opcode::either:
      return true;
    default:
      return false;
  }
}

// Every value that an instruction can take, whatever the batch.
Bounds bounds_of(const Instruction& instruction, const std::vector<Bounds>& earlier) {
  switch (instruction.opcode) {
    case Opcode::constant:
      return {instruction.constant, instruction.constant};
    case Opcode::q_pos:
      return {-kIntMax, kIntMax};
    case Opcode::operand:
      return {kIntMin, kIntMax};
    case Opcode::add:
      return {earlier[instruction.left].low + earlier[instruction.right].low,
              earlier[instruction.left].high + earlier[instruction.right].high};
    case Opcode::subtract:
      return {earlier[instruction.left].low - earlier[instruction.right].high,
              earlier[instruction.left].high - earlier[instruction.right].low};
    default:  // kv_pos, q_head, request, lengths; truths are 0 or 1
      return {0, kIntMax};
  }
}

std::string load_of(const Instruction& instruction) {
  switch (instruction.scope) {
    case OperandScope::request:
      return fmt::format("m.operand[{}][0]", instruction.operand);
    case OperandScope::query:
      return fmt::format("m.operand[{}][query]", instruction.operand);
    case OperandScope::new_key:
      return fmt::format("(kv_pos < m.kv_len - m.q_len ? 0 : m.operand[{}][kv_pos - (m.kv_len - m.q_len)])",
                         instruction.operand);
    case OperandScope::key:
      return fmt::format("m.operand[{}][kv_pos]", instruction.operand);
  }
  return "";
}

std::string expression_of(const Instruction& instruction, bool in_int) {
  const auto binary = [&](const char* sign) {
    return in_int ? fmt::format("v{} {} v{}", instruction.left, sign, instruction.right)
                  : fmt::format("(long long)v{} {} (long long)v{}", instruction.left, sign, instruction.right);
  };
  switch (instruction.opcode) {
    case Opcode::constant:
      return in_int ? fmt::format("{}", instruction.constant) : fmt::format("{}ll", instruction.constant);
    case Opcode::q_pos:
      return "q_pos";
    case Opcode::kv_pos:
      return "kv_pos";
    case Opcode::q_head:
      return "q_head";
    case Opcode::request:
      return "m.request";
    case Opcode::q_len:
      return "m.q_len";
    case Opcode::kv_len:
      return "m.kv_len";
    case Opcode::operand:
      return load_of(instruction);
    case Opcode::add:
      return binary("+");
    case Opcode::subtract:
      return binary("-");
    case Opcode::less:
      return binary("<");
    case Opcode::less_equal:
      return binary("<=");
    case Opcode::equal:
      return binary("==");
    case Opcode::truth:
      return instruction.constant != 0 ? "true" : "false";
    case Opcode::negate:
      return fmt::format("!v{}", instruction.left);
    case Opcode::both:
      return fmt::format("v{} & v{}", instruction.left, instruction.right);
    case Opcode::either:
      return fmt::format("v{} | v{}", instruction.left, instruction.right);
  }
  return "";
}

// The text of an instruction's bounds over a tile.
struct RangeText {
  std::string low, high;
};

RangeText range_of(const Instruction& instruction, bool in_int) {
  const auto low = [&](int32_t i) { return fmt::format("{}low{}", in_int ? "" : "(long long)", i); };
  const auto high = [&](int32_t i) { return fmt::format("{}high{}", in_int ? "" : "(long long)", i); };
  const int32_t a = instruction.left, b = instruction.right;
  switch (instruction.opcode) {
    case Opcode::q_pos:
      return {"q_low", "q_high"};
    case Opcode::kv_pos:
      return {"kv_low", "kv_high"};
    case Opcode::q_head:
      return {"0", fmt::format("{}", kIntMax)};
    case Opcode::operand:
      if (instruction.scope == OperandScope::request) break;
      return {fmt::format("{} - 1", kIntMin + 1), fmt::format("{}", kIntMax)};  // would have to be read one by one
    case Opcode::add:
      return {low(a) + " + " + low(b), high(a) + " + " + high(b)};
    case Opcode::subtract:
      return {low(a) + " - " + high(b), high(a) + " - " + low(b)};
    case Opcode::less:
      return {high(a) + " < " + low(b), low(a) + " < " + high(b)};
    case Opcode::less_equal:
      return {high(a) + " <= " + low(b), low(a) + " <= " + high(b)};
    case Opcode::equal:
      return {fmt::format("low{0} == high{0} & low{1} == high{1} & low{0} == low{1}", a, b),
              fmt::format("low{0} <= high{1} & low{1} <= high{0}", a, b)};
    case Opcode::negate:
      return {fmt::format("!{}", high(a)), fmt::format("!{}", low(a))};
    case Opcode::both:
      return {low(a) + " & " + low(b), high(a) + " & " + high(b)};
    case Opcode::either:
      return {low(a) + " | " + low(b), high(a) + " | " + high(b)};
    default:
      break;
  }
  const std::string value = expression_of(instruction, in_int);  // alike for the whole tile
  return {value, value};
}

// Instructions one by one, with the type that holds every value of each.
template <class Emit>
void for_each_typed(const Program& program, Emit&& emit) {
  std::vector<Bounds> bounds;
  for (size_t i = 0; i < program.code.size(); ++i) {
    const Instruction& instruction = program.code[i];
    bounds.push_back(bounds_of(instruction, bounds));
    const bool truth = is_truth(instruction.opcode);
    // A comparison of two ints is exact in int; sums and constants are wide where their bounds are.
    const bool in_int = truth || bounds.back().fits_int();
    emit(i, instruction, truth ? "bool" : in_int ? "int" : "long long", in_int);
  }
}

}  // namespace

std::string emit_cuda(const Program& program) {
  std::string text =
      "__device__ __forceinline__ bool visible(const MaskContext& m, int q_pos, int kv_pos, int q_head, int query) {\n";
  for_each_typed(program, [&](size_t i, const Instruction& instruction, const char* type, bool in_int) {
    text += fmt::format("  const {} v{} = {};\n", type, i, expression_of(instruction, in_int));
  });
  return text + fmt::format("  return v{};\n}}\n", program.code.size() - 1);
}

std::string emit_tile_class_cuda(const Program& program) {
  std::string text =
      "__device__ __forceinline__ TileClass classify(const MaskContext& m, int q_low, int q_high, int kv_low,"
      " int kv_high) {\n";
  for_each_typed(program, [&](size_t i, const Instruction& instruction, const char* type, bool in_int) {
    const RangeText range = range_of(instruction, in_int);
    text += fmt::format("  const {} low{} = {}, high{} = {};\n", type, i, range.low, i, range.high);
  });
  return text +
         fmt::format("  return low{0} ? TileClass::full : high{0} ? TileClass::partial : TileClass::empty;\n}}\n",
                     program.code.size() - 1);
}

}  // namespace qkv::mask
