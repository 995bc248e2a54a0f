// The definition: the truth of one pair by plain recursion. Rows, tile classes and kernels are held against it.
#include "core/checks.hpp"
#include "mask/expression.hpp"
#include "mask/program.hpp"
#include "mask/scene.hpp"

namespace qkv {
namespace mask {
namespace {

struct Pair {
  const std::vector<OperandDeclaration>& operands;
  const ProgramInput& input;
  int32_t q_head;
  int32_t query;
  int32_t kv_pos;
};

int64_t operand_of(const mask_detail::Node& node, const Pair& pair) {
  size_t index = 0;
  while (pair.operands[index].name != node.name) ++index;
  const int32_t* values = pair.input.operand[index];
  switch (node.scope) {
    case OperandScope::request:
      return values[0];
    case OperandScope::query:
      return values[pair.query];
    case OperandScope::key:
      return values[pair.kv_pos];
    case OperandScope::new_key:
      break;
  }
  const int64_t new_key = int64_t{pair.kv_pos} - (int64_t{pair.input.kv_len} - pair.input.q_len);
  return new_key < 0 ? 0 : values[new_key];
}

// A number, or 0 or 1 for a truth.
int64_t value_of(const mask_detail::Node& node, const Pair& pair) {
  const auto left = [&] { return value_of(*node.left, pair); };
  const auto right = [&] { return value_of(*node.right, pair); };
  switch (node.opcode) {
    case Opcode::constant:
    case Opcode::truth:
      return node.constant;
    case Opcode::q_pos:
      return int64_t{pair.query} + pair.input.kv_len - pair.input.q_len;
    case Opcode::kv_pos:
      return pair.kv_pos;
    case Opcode::q_head:
      return pair.q_head;
    case Opcode::request:
      return pair.input.request;
    case Opcode::q_len:
      return pair.input.q_len;
    case Opcode::kv_len:
      return pair.input.kv_len;
    case Opcode::operand:
      return operand_of(node, pair);
    case Opcode::add:
      return left() + right();
    case Opcode::subtract:
      return left() - right();
    case Opcode::less:
      return left() < right();
    case Opcode::less_equal:
      return left() <= right();
    case Opcode::equal:
      return left() == right();
    case Opcode::negate:
      return left() == 0;
    case Opcode::both:
      return left() != 0 && right() != 0;
    case Opcode::either:
      return left() != 0 || right() != 0;
  }
  return 0;
}

}  // namespace
}  // namespace mask

bool is_visible(const Mask& mask, const MaskScene& scene, int32_t query, int32_t kv_pos) {
  const std::vector<OperandDeclaration>& operands = mask.node()->operands;
  const mask::ProgramInput input = mask::bind_scene(operands, scene);
  if (query < 0 || query >= scene.q_len) refuse("query", query, fmt::format("0 to q_len - 1 = {}", scene.q_len - 1));
  if (kv_pos < 0 || kv_pos >= scene.kv_len) {
    refuse("kv_pos", kv_pos, fmt::format("0 to kv_len - 1 = {}", scene.kv_len - 1));
  }
  return mask::value_of(*mask.node(), {operands, input, scene.q_head, query, kv_pos}) != 0;
}

}  // namespace qkv
