// Nodes, operators, canonical text and hash. a > b is kept as b < a, a >= b as b <= a and a != b as ~(a == b), so that
// engines see three comparisons only.
#include "mask/expression.hpp"

#include <xxhash.h>

#include <algorithm>
#include <array>

#include "qkv/status.hpp"

namespace qkv {
namespace mask_detail {
namespace {

// Positions, lengths, heads, requests and operands are 32-bit numbers.
constexpr int64_t kAtomMagnitude = int64_t{1} << 31;

// Strength of binding, weakest first. A comparison does not chain.
enum Precedence : int { kEither = 1, kBoth, kNegate, kComparison, kSum, kAtom };

Error refusal(std::string value, std::string allowed) {
  return Error(ErrorCode::invalid_argument, "mask", std::move(value), std::move(allowed));
}

std::string_view shape_of(OperandScope scope) {
  switch (scope) {
    case OperandScope::request:
      return "[request]";
    case OperandScope::key:
      return "[key]";
    default:
      return "[query] or [new_key]";
  }
}

std::vector<OperandDeclaration> merge_operands(const std::vector<OperandDeclaration>& left,
                                               const std::vector<OperandDeclaration>& right) {
  std::vector<OperandDeclaration> merged;
  const auto by_name = [](const OperandDeclaration& a, const OperandDeclaration& b) { return a.name < b.name; };
  std::merge(left.begin(), left.end(), right.begin(), right.end(), std::back_inserter(merged), by_name);
  merged.erase(std::unique(merged.begin(), merged.end()), merged.end());
  for (size_t i = 1; i < merged.size(); ++i) {
    if (merged[i].name != merged[i - 1].name) continue;
    throw refusal("operand " + merged[i].name + " used both as " + std::string(shape_of(merged[i - 1].scope)) +
                      " and as " + std::string(shape_of(merged[i].scope)),
                  "one array shape a name: [request], [query] and [new_key], or [key]");
  }
  return merged;
}

Precedence precedence_of(const Node& node) {
  switch (node.opcode) {
    case Opcode::either:
      return kEither;
    case Opcode::both:
      return kBoth;
    case Opcode::negate:
      return node.left->opcode == Opcode::equal ? kComparison : kNegate;  // a != b
    case Opcode::less:
    case Opcode::less_equal:
    case Opcode::equal:
      return kComparison;
    case Opcode::add:
    case Opcode::subtract:
      return kSum;
    default:
      return kAtom;
  }
}

std::string_view symbol_of(Opcode opcode) {
  switch (opcode) {
    case Opcode::q_pos:
      return "q_pos";
    case Opcode::kv_pos:
      return "kv_pos";
    case Opcode::q_head:
      return "q_head";
    case Opcode::request:
      return "request";
    case Opcode::q_len:
      return "q_len";
    case Opcode::kv_len:
      return "kv_len";
    case Opcode::add:
      return " + ";
    case Opcode::subtract:
      return " - ";
    case Opcode::less:
      return " < ";
    case Opcode::less_equal:
      return " <= ";
    case Opcode::equal:
      return " == ";
    case Opcode::both:
      return " & ";
    case Opcode::either:
      return " | ";
    default:
      return "";
  }
}

std::string_view scope_name(OperandScope scope) {
  constexpr std::array<std::string_view, 4> kNames = {"request", "query", "new_key", "key"};
  return kNames[static_cast<size_t>(scope)];
}

void print(const Node& node, int required, std::string& out);

void print_binary(const Node& node, std::string_view symbol, Precedence precedence, std::string& out) {
  print(*node.left, precedence, out);
  out += symbol;
  print(*node.right, precedence + 1, out);  // all operators group to the left
}

void print(const Node& node, int required, std::string& out) {
  const Precedence precedence = precedence_of(node);
  const bool parentheses = precedence < required;
  if (parentheses) out += '(';
  switch (node.opcode) {
    case Opcode::constant:
      out += std::to_string(node.constant);
      break;
    case Opcode::truth:
      out += node.constant != 0 ? "true" : "false";
      break;
    case Opcode::operand:
      out.append(node.name).append("[").append(scope_name(node.scope)).append("]");
      break;
    case Opcode::negate:
      if (precedence == kComparison) {
        print_binary(*node.left, " != ", precedence, out);
      } else {
        out += '~';
        print(*node.left, kNegate, out);
      }
      break;
    default:
      if (node.left == nullptr) {
        out += symbol_of(node.opcode);
      } else {
        print_binary(node, symbol_of(node.opcode), precedence, out);
      }
  }
  if (parentheses) out += ')';
}

void check_name(const std::string& name) {
  const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  constexpr std::array<std::string_view, 8> kReserved = {"q_pos", "kv_pos", "q_head", "request",
                                                         "q_len", "kv_len", "true",   "false"};
  const bool is_identifier = !name.empty() && is_letter(name[0]) &&
                             std::all_of(name.begin(), name.end(), [&](char c) { return is_letter(c) || is_digit(c); });
  if (!is_identifier || std::find(kReserved.begin(), kReserved.end(), name) != kReserved.end()) {
    throw Error(ErrorCode::invalid_argument, "operand name", '"' + name + '"',
                "letters, digits and _, not beginning with a digit, and not the name of an atom");
  }
}

}  // namespace

bool is_truth(Opcode opcode) { return opcode >= Opcode::less; }

NodePtr make_constant(int64_t constant) {
  if (constant > kMaxMagnitude || constant < -kMaxMagnitude) {
    throw refusal("constant " + std::to_string(constant), "constants from -2^60 to 2^60");
  }
  auto node = std::make_shared<Node>();
  node->opcode = Opcode::constant;
  node->constant = constant;
  node->magnitude = constant < 0 ? -constant : constant;
  return node;
}

NodePtr make_truth(bool truth) {
  auto node = std::make_shared<Node>();
  node->opcode = Opcode::truth;
  node->constant = truth ? 1 : 0;
  return node;
}

NodePtr make_atom(Opcode opcode) {
  auto node = std::make_shared<Node>();
  node->opcode = opcode;
  node->magnitude = kAtomMagnitude;
  return node;
}

NodePtr make_operand(std::string name, OperandScope scope) {
  check_name(name);
  auto node = std::make_shared<Node>();
  node->opcode = Opcode::operand;
  node->scope = scope;
  node->magnitude = kAtomMagnitude;
  node->operands = {{name, scope == OperandScope::new_key ? OperandScope::query : scope}};
  node->name = std::move(name);
  return node;
}

NodePtr make_operation(Opcode opcode, NodePtr left, NodePtr right) {
  auto node = std::make_shared<Node>();
  node->opcode = opcode;
  node->depth = 1 + std::max(left->depth, right ? right->depth : 0);
  node->size = 1 + left->size + (right ? right->size : 0);
  if (node->depth > kMaxDepth) {
    throw refusal("operations nested " + std::to_string(node->depth) + " deep",
                  "at most " + std::to_string(kMaxDepth) + "; long chains can be grouped in pairs");
  }
  if (node->size > kMaxSize) {
    throw refusal("an expression of " + std::to_string(node->size) + " terms and operations",
                  "at most " + std::to_string(kMaxSize) + "; put lists of numbers into an operand");
  }
  if (!is_truth(opcode)) {
    node->magnitude = left->magnitude + right->magnitude;
    if (node->magnitude > kMaxMagnitude) {
      throw refusal("a sum that can reach " + std::to_string(node->magnitude), "sums that stay within 2^60");
    }
  }
  node->operands = right ? merge_operands(left->operands, right->operands) : left->operands;
  node->left = std::move(left);
  node->right = std::move(right);
  return node;
}

std::string text_of(const Node& node) {
  std::string text;
  print(node, kEither, text);
  return text;
}

}  // namespace mask_detail

using mask::Opcode;
using mask_detail::make_operation;

MaskValue::MaskValue(int64_t constant) : node_(mask_detail::make_constant(constant)) {}
std::string MaskValue::text() const { return mask_detail::text_of(*node_); }

Mask::Mask() : node_(mask_detail::make_truth(true)) {}
std::string Mask::text() const { return mask_detail::text_of(*node_); }
uint64_t Mask::hash() const {
  const std::string canonical = text();
  return XXH64(canonical.data(), canonical.size(), 0);
}

MaskValue operator+(const MaskValue& a, const MaskValue& b) {
  return MaskValue(make_operation(Opcode::add, a.node(), b.node()));
}
MaskValue operator-(const MaskValue& a, const MaskValue& b) {
  return MaskValue(make_operation(Opcode::subtract, a.node(), b.node()));
}
Mask operator<(const MaskValue& a, const MaskValue& b) {
  return Mask(make_operation(Opcode::less, a.node(), b.node()));
}
Mask operator<=(const MaskValue& a, const MaskValue& b) {
  return Mask(make_operation(Opcode::less_equal, a.node(), b.node()));
}
Mask operator>(const MaskValue& a, const MaskValue& b) { return b < a; }
Mask operator>=(const MaskValue& a, const MaskValue& b) { return b <= a; }
Mask operator==(const MaskValue& a, const MaskValue& b) {
  return Mask(make_operation(Opcode::equal, a.node(), b.node()));
}
Mask operator!=(const MaskValue& a, const MaskValue& b) { return ~(a == b); }
Mask operator&(const Mask& a, const Mask& b) { return Mask(make_operation(Opcode::both, a.node(), b.node())); }
Mask operator|(const Mask& a, const Mask& b) { return Mask(make_operation(Opcode::either, a.node(), b.node())); }
Mask operator~(const Mask& a) { return Mask(make_operation(Opcode::negate, a.node())); }

std::vector<OperandDeclaration> operands_of(const Mask& mask) { return mask.node()->operands; }

}  // namespace qkv
