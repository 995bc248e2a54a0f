// Text to mask: recursive descent with precedence climbing. Grammar, weakest first:
//   |    &    ~    < <= > >= == != (no chains)    + -    number, atom, name[scope], built-in, ( )
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <span>

#include "mask/expression.hpp"
#include "qkv/status.hpp"

namespace qkv {
namespace {

using mask::Opcode;
using mask_detail::NodePtr;

struct BinaryOperator {
  std::string_view symbol;
  int precedence;
  Opcode opcode;
  bool swaps = false;    // a > b is b < a
  bool negates = false;  // a != b is ~(a == b)
};

constexpr int kEither = 1;
constexpr int kNegate = 3;
constexpr int kComparison = 4;

// A longer symbol stands before its own beginning.
constexpr std::array<BinaryOperator, 10> kOperators = {{
    {"|", kEither, Opcode::either},
    {"&", 2, Opcode::both},
    {"<=", kComparison, Opcode::less_equal},
    {">=", kComparison, Opcode::less_equal, true},
    {"==", kComparison, Opcode::equal},
    {"!=", kComparison, Opcode::equal, false, true},
    {"<", kComparison, Opcode::less},
    {">", kComparison, Opcode::less, true},
    {"+", 5, Opcode::add},
    {"-", 5, Opcode::subtract},
}};

using Arguments = std::span<const int64_t>;

struct BuiltIn {
  std::string_view name;
  size_t min_arguments;
  size_t max_arguments;
  std::string_view usage;
  Mask (*make)(Arguments);
};

const std::array<BuiltIn, 10> kBuiltIns = {{
    {"everything", 0, 0, "everything", [](Arguments) { return mask::everything(); }},
    {"nothing", 0, 0, "nothing", [](Arguments) { return mask::nothing(); }},
    {"causal", 0, 0, "causal", [](Arguments) { return mask::causal(); }},
    {"window", 2, 2, "window(window_left, window_right)", [](Arguments a) { return mask::window(a[0], a[1]); }},
    {"sliding_window", 1, 2, "sliding_window(num_tokens) or sliding_window(num_tokens, bidirectional)",
     [](Arguments a) { return mask::sliding_window(a[0], a.size() > 1 && a[1] != 0); }},
    {"rswa", 1, 1, "rswa(window_tokens)", [](Arguments a) { return mask::rswa(a[0]); }},
    {"prefix_lm", 0, 2, "prefix_lm, prefix_lm(window_left) or prefix_lm(window_left, clamp)",
     [](Arguments a) { return mask::prefix_lm(a.empty() ? -1 : a[0], a.size() > 1 && a[1] != 0); }},
    {"per_request_causal", 0, 0, "per_request_causal", [](Arguments) { return mask::per_request_causal(); }},
    {"document", 0, 0, "document", [](Arguments) { return mask::document(); }},
    {"tree", 0, 0, "tree", [](Arguments) { return mask::tree(); }},
}};

constexpr std::array<std::pair<std::string_view, Opcode>, 6> kAtoms = {{
    {"q_pos", Opcode::q_pos},
    {"kv_pos", Opcode::kv_pos},
    {"q_head", Opcode::q_head},
    {"request", Opcode::request},
    {"q_len", Opcode::q_len},
    {"kv_len", Opcode::kv_len},
}};

constexpr std::array<std::pair<std::string_view, OperandScope>, 4> kScopes = {{
    {"request", OperandScope::request},
    {"query", OperandScope::query},
    {"new_key", OperandScope::new_key},
    {"key", OperandScope::key},
}};

template <typename Table>
auto find_named(const Table& table, std::string_view name) {
  return std::find_if(table.begin(), table.end(), [&](const auto& entry) { return entry.first == name; });
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || is_digit(c); }

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Mask parse_all() {
    skip_spaces();
    const size_t start = position_;
    NodePtr node = parse_expression(kEither);
    if (position_ != text_.size()) fail(position_, "an operator or the end");
    return Mask(need_truth(std::move(node), start));
  }

 private:
  // All operators that bind at least as tightly as `weakest`.
  NodePtr parse_expression(int weakest) {
    const size_t left_start = position_;
    NodePtr left = parse_primary();
    bool is_compared = false;
    while (const BinaryOperator* found = peek_operator()) {
      if (found->precedence < weakest) break;
      if (found->precedence == kComparison && is_compared) {
        fail(position_, "no second comparison; join two comparisons by &");
      }
      take(found->symbol.size());
      const size_t right_start = position_;
      NodePtr right = parse_expression(found->precedence + 1);
      left = combine(*found, std::move(left), left_start, std::move(right), right_start);
      is_compared = found->precedence == kComparison;
    }
    return left;
  }

  NodePtr combine(const BinaryOperator& binary, NodePtr left, size_t left_start, NodePtr right, size_t right_start) {
    const bool joins_truths = binary.precedence < kNegate;
    left = joins_truths ? need_truth(std::move(left), left_start) : need_value(std::move(left), left_start);
    right = joins_truths ? need_truth(std::move(right), right_start) : need_value(std::move(right), right_start);
    if (binary.swaps) std::swap(left, right);
    NodePtr node = mask_detail::make_operation(binary.opcode, std::move(left), std::move(right));
    return binary.negates ? mask_detail::make_operation(Opcode::negate, std::move(node)) : node;
  }

  NodePtr parse_primary() {
    const size_t start = position_;
    if (accept('(')) {
      const Nesting nesting(*this, start);
      NodePtr node = parse_expression(kEither);
      expect(')');
      return node;
    }
    if (accept('~')) {
      const Nesting nesting(*this, start);
      const size_t inner_start = position_;
      return mask_detail::make_operation(Opcode::negate, need_truth(parse_expression(kNegate), inner_start));
    }
    if (const std::optional<int64_t> number = accept_integer()) return mask_detail::make_constant(*number);
    if (position_ < text_.size() && is_word(text_[position_])) return parse_name();
    fail(start, "a number, an atom such as kv_pos, name[scope], a built-in such as causal, ~ or (");
  }

  NodePtr parse_name() {
    const size_t start = position_;
    const std::string_view name = take_word();
    if (accept('[')) return parse_scope(name);
    if (name == "true" || name == "false") return mask_detail::make_truth(name == "true");
    if (const auto atom = find_named(kAtoms, name); atom != kAtoms.end()) return mask_detail::make_atom(atom->second);
    const auto built_in = std::find_if(kBuiltIns.begin(), kBuiltIns.end(), [&](auto& b) { return b.name == name; });
    if (built_in == kBuiltIns.end()) {
      fail(start,
           "q_pos, kv_pos, q_head, request, q_len, kv_len, true, false, a built-in mask, or an operand as "
           "name[request], name[query], name[new_key] or name[key]");
    }
    return parse_call(*built_in, start);
  }

  NodePtr parse_scope(std::string_view name) {
    const size_t start = position_;
    const auto scope = find_named(kScopes, take_word());
    if (scope == kScopes.end()) fail(start, "request, query, new_key or key");
    expect(']');
    return mask_detail::make_operand(std::string(name), scope->second);
  }

  NodePtr parse_call(const BuiltIn& built_in, size_t start) {
    std::vector<int64_t> arguments;
    if (accept('(') && !accept(')')) {
      do {
        arguments.push_back(parse_argument());
      } while (accept(','));
      expect(')');
    }
    if (arguments.size() < built_in.min_arguments || arguments.size() > built_in.max_arguments) {
      fail(start, std::string(built_in.usage));
    }
    return built_in.make(arguments).node();
  }

  int64_t parse_argument() {
    if (const std::optional<int64_t> number = accept_integer()) return *number;
    const size_t start = position_;
    const std::string_view word = take_word();
    if (word != "true" && word != "false") fail(start, "an integer, true or false");
    return word == "true" ? 1 : 0;
  }

  // A minus sign belongs to the number that follows it directly.
  std::optional<int64_t> accept_integer() {
    size_t end = position_;
    if (end < text_.size() && text_[end] == '-') ++end;
    if (end >= text_.size() || !is_digit(text_[end])) return std::nullopt;
    while (end < text_.size() && is_word(text_[end])) ++end;
    int64_t number = 0;
    const char* last = text_.data() + end;
    const auto [stop, error] = std::from_chars(text_.data() + position_, last, number);
    if (error != std::errc() || stop != last) fail(position_, "an integer of at most 64 bits");
    take(end - position_);
    return number;
  }

  NodePtr need_truth(NodePtr node, size_t start) const {
    if (!mask_detail::is_truth(node->opcode)) fail(start, "a truth, such as a comparison, instead of a number");
    return node;
  }

  NodePtr need_value(NodePtr node, size_t start) const {
    if (mask_detail::is_truth(node->opcode)) fail(start, "a number instead of a truth");
    return node;
  }

  const BinaryOperator* peek_operator() const {
    const std::string_view rest = text_.substr(position_);
    const auto found = std::find_if(kOperators.begin(), kOperators.end(), [&](const BinaryOperator& candidate) {
      return rest.starts_with(candidate.symbol);
    });
    return found == kOperators.end() ? nullptr : &*found;
  }

  void skip_spaces() {
    constexpr std::string_view kSpaces = " \t\r\n";
    while (position_ < text_.size() && kSpaces.find(text_[position_]) != std::string_view::npos) ++position_;
  }

  void take(size_t length) {
    position_ += length;
    skip_spaces();
  }

  std::string_view take_word() {
    size_t end = position_;
    while (end < text_.size() && is_word(text_[end])) ++end;
    const std::string_view word = text_.substr(position_, end - position_);
    take(word.size());
    return word;
  }

  bool accept(char symbol) {
    if (position_ >= text_.size() || text_[position_] != symbol) return false;
    take(1);
    return true;
  }

  void expect(char symbol) {
    if (!accept(symbol)) fail(position_, std::string(1, symbol));
  }

  // Bounds the recursion: text from outside must not overflow the stack.
  struct Nesting {
    Nesting(Parser& parser, size_t start) : depth(parser.depth_) {
      if (++depth > mask_detail::kMaxDepth) {
        parser.fail(start, "at most " + std::to_string(mask_detail::kMaxDepth) + " nested ( and ~");
      }
    }
    ~Nesting() { --depth; }
    int32_t& depth;
  };

  [[noreturn]] void fail(size_t at, const std::string& expected) const {
    constexpr size_t kShown = 24;
    std::string found = at >= text_.size() ? "the end" : "\"" + std::string(text_.substr(at, kShown));
    if (at < text_.size()) found += at + kShown < text_.size() ? "…\"" : "\"";
    throw Error(ErrorCode::invalid_argument, "mask", found + " at character " + std::to_string(at + 1), expected);
  }

  std::string_view text_;
  size_t position_ = 0;
  int32_t depth_ = 0;
};

}  // namespace

Mask parse_mask(std::string_view text) { return Parser(text).parse_all(); }

}  // namespace qkv
