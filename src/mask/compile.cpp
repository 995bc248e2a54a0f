// Mask to program: equal subexpressions become one instruction, and what needs no batch to be known is decided here.
#include <map>
#include <tuple>

#include "mask/expression.hpp"
#include "mask/program.hpp"

namespace qkv::mask {
namespace {

using mask_detail::Node;

class Compiler {
 public:
  explicit Compiler(const Node& root) : operands_(root.operands) {}

  int32_t add(const Node& node) {
    Instruction instruction{node.opcode};
    instruction.constant = node.constant;
    if (node.opcode == Opcode::operand) {
      instruction.scope = node.scope;
      instruction.operand = index_of(node.name);
    }
    if (node.left != nullptr) instruction.left = add(*node.left);
    if (node.right != nullptr) instruction.right = add(*node.right);
    return node.left != nullptr ? fold(instruction) : emit(instruction);
  }

  // Leaves out what folding made superfluous. Operands stay: they are part of what a mask asks for.
  Program finish(int32_t root) && {
    std::vector<bool> is_used(code_.size(), false);
    is_used[root] = true;
    for (int32_t i = root; i >= 0; --i) {
      if (!is_used[i]) continue;
      if (code_[i].left >= 0) is_used[code_[i].left] = true;
      if (code_[i].right >= 0) is_used[code_[i].right] = true;
    }
    Program program;
    program.operands = operands_;
    std::vector<int32_t> moved(code_.size(), -1);
    for (int32_t i = 0; i <= root; ++i) {
      if (!is_used[i]) continue;
      Instruction instruction = code_[i];
      if (instruction.left >= 0) instruction.left = moved[instruction.left];
      if (instruction.right >= 0) instruction.right = moved[instruction.right];
      moved[i] = static_cast<int32_t>(program.code.size());
      program.code.push_back(instruction);
      program.depends_on_head |= instruction.opcode == Opcode::q_head;
    }
    return program;
  }

 private:
  int32_t index_of(const std::string& name) const {
    for (size_t i = 0; i < operands_.size(); ++i) {
      if (operands_[i].name == name) return static_cast<int32_t>(i);
    }
    return -1;
  }

  int32_t emit(const Instruction& instruction) {
    const auto key = std::make_tuple(instruction.opcode, instruction.scope, instruction.left, instruction.right,
                                     instruction.operand, instruction.constant);
    const auto [entry, is_added] = known_.try_emplace(key, static_cast<int32_t>(code_.size()));
    if (is_added) code_.push_back(instruction);
    return entry->second;
  }

  int32_t emit_constant(Opcode opcode, int64_t constant) {
    Instruction instruction{opcode};
    instruction.constant = constant;
    return emit(instruction);
  }

  int32_t fold(const Instruction& instruction) {
    const Instruction left = code_[instruction.left];
    const Instruction right = instruction.right >= 0 ? code_[instruction.right] : left;
    const bool is_known =
        left.opcode == right.opcode && (left.opcode == Opcode::constant || left.opcode == Opcode::truth);
    const bool is_same = instruction.left == instruction.right;
    const int64_t a = left.constant;
    const int64_t b = right.constant;
    switch (instruction.opcode) {
      case Opcode::add:
        if (is_known) return emit_constant(Opcode::constant, a + b);
        break;
      case Opcode::subtract:
        if (is_known || is_same) return emit_constant(Opcode::constant, is_same ? 0 : a - b);
        break;
      case Opcode::less:
        if (is_known || is_same) return emit_constant(Opcode::truth, !is_same && a < b);
        break;
      case Opcode::less_equal:
        if (is_known || is_same) return emit_constant(Opcode::truth, is_same || a <= b);
        break;
      case Opcode::equal:
        if (is_known || is_same) return emit_constant(Opcode::truth, is_same || a == b);
        break;
      case Opcode::negate:
        if (is_known) return emit_constant(Opcode::truth, 1 - a);
        if (left.opcode == Opcode::negate) return left.left;
        break;
      case Opcode::both:
        if (is_same || is_truth(right, 1) || is_truth(left, 0)) return instruction.left;
        if (is_truth(left, 1) || is_truth(right, 0)) return instruction.right;
        break;
      case Opcode::either:
        if (is_same || is_truth(right, 0) || is_truth(left, 1)) return instruction.left;
        if (is_truth(left, 0) || is_truth(right, 1)) return instruction.right;
        break;
      default:
        break;
    }
    return emit(instruction);
  }

  static bool is_truth(const Instruction& instruction, int64_t truth) {
    return instruction.opcode == Opcode::truth && instruction.constant == truth;
  }

  std::vector<OperandDeclaration> operands_;
  std::vector<Instruction> code_;
  std::map<std::tuple<Opcode, OperandScope, int32_t, int32_t, int32_t, int64_t>, int32_t> known_;
};

}  // namespace

Program compile(const Mask& mask) {
  Compiler compiler(*mask.node());
  const int32_t root = compiler.add(*mask.node());
  return std::move(compiler).finish(root);
}

}  // namespace qkv::mask
