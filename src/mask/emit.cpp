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

}  // namespace

std::string emit_cuda(const Program& program) {
  std::string text =
      "__device__ __forceinline__ bool visible(const MaskContext& m, int q_pos, int kv_pos, int q_head, int query) {\n";
  std::vector<Bounds> bounds;
  for (size_t i = 0; i < program.code.size(); ++i) {
    const Instruction& instruction = program.code[i];
    bounds.push_back(bounds_of(instruction, bounds));
    const bool truth = is_truth(instruction.opcode);
    // A comparison of two ints is exact in int; sums and constants are wide where their bounds are.
    const bool in_int = truth || bounds.back().fits_int();
    const char* type = truth ? "bool" : in_int ? "int" : "long long";
    text += fmt::format("  const {} v{} = {};\n", type, i, expression_of(instruction, in_int));
  }
  return text + fmt::format("  return v{};\n}}\n", program.code.size() - 1);
}

}  // namespace qkv::mask
