#include "mask/shift.hpp"

#include "mask/expression.hpp"

namespace qkv::mask {
namespace {

using mask_detail::make_operation;
using mask_detail::Node;
using mask_detail::NodePtr;

MaskValue per_request(const char* name) { return operand(name, OperandScope::request); }

NodePtr shifted(const NodePtr& node, KeyRun run) {
  switch (node->opcode) {
    case Opcode::q_pos:
    case Opcode::kv_len:
      return (MaskValue(node) + per_request(kPositionShift)).node();
    case Opcode::kv_pos:
      return (MaskValue(node) + per_request(kKeyShift)).node();
    case Opcode::request:
      return per_request(kRequestNumber).node();
    case Opcode::operand:
      // The context has no new keys: the operand is 0 there by definition.
      return node->scope == OperandScope::new_key && run == KeyRun::context ? mask_detail::make_constant(0) : node;
    default:
      if (node->left == nullptr) return node;
      return make_operation(node->opcode, shifted(node->left, run),
                            node->right == nullptr ? nullptr : shifted(node->right, run));
  }
}

NodePtr with_head(const NodePtr& node, int32_t first_head) {
  if (node->opcode == Opcode::q_head) return (MaskValue(node) + first_head).node();
  if (node->left == nullptr) return node;
  return make_operation(node->opcode, with_head(node->left, first_head),
                        node->right == nullptr ? nullptr : with_head(node->right, first_head));
}

}  // namespace

Mask with_first_head(const Mask& mask, int32_t first_head) {
  return first_head == 0 ? mask : Mask(with_head(mask.node(), first_head));
}

Mask shift(const Mask& mask, KeyRun run) {
  if (run == KeyRun::all) return mask;
  // The usual mask, whose two runs need no shift: a new token sees all context, and of the new ones those before it.
  if (mask.text() == causal().text()) return run == KeyRun::context ? everything() : causal();
  return Mask(shifted(mask.node(), run));
}

}  // namespace qkv::mask
