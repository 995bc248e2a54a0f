// The tree behind Mask and MaskValue. A node is immutable and checked when it is made, so that no later step needs to:
// types fit, sums cannot overflow 64 bits, and recursion over the tree is bounded.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mask/program.hpp"
#include "qkv/mask.hpp"

namespace qkv::mask_detail {

using mask::Opcode;

// Recursion (text, truth of a pair, destruction) goes at most this deep.
inline constexpr int32_t kMaxDepth = 256;
// Nodes counted as a tree: shared subtrees count each time, which bounds the text.
inline constexpr int32_t kMaxSize = 10000;
// No value can exceed this, whatever the batch: the difference of two values still fits 64 bits.
inline constexpr int64_t kMaxMagnitude = int64_t{1} << 60;

struct Node {
  Opcode opcode;
  OperandScope scope = OperandScope::request;  // of `operand`
  int64_t constant = 0;                        // of `constant`, and 0 or 1 for `truth`
  std::string name;                            // of `operand`
  NodePtr left;
  NodePtr right;  // nullptr for `negate`

  int32_t depth = 1;
  int32_t size = 1;
  int64_t magnitude = 0;                     // no value of this node is further from 0
  std::vector<OperandDeclaration> operands;  // below this node, in order of name
};

bool is_truth(Opcode opcode);

NodePtr make_constant(int64_t constant);
NodePtr make_truth(bool truth);
NodePtr make_atom(Opcode opcode);
NodePtr make_operand(std::string name, OperandScope scope);
NodePtr make_operation(Opcode opcode, NodePtr left, NodePtr right = nullptr);

std::string text_of(const Node& node);

}  // namespace qkv::mask_detail
