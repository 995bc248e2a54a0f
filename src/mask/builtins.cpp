// The built-in masks, written in the mask language itself.
#include <algorithm>

#include "mask/expression.hpp"
#include "qkv/status.hpp"

namespace qkv::mask {
namespace {

using mask_detail::make_atom;

// No two positions of a request are further apart, so such a window hides nothing.
constexpr int64_t kUnlimited = (int64_t{1} << 31) - 1;
constexpr int64_t kOpen = -1;

// -1 for a side that hides nothing.
int64_t checked_window(const char* name, int64_t tokens) {
  if (tokens < kOpen) {
    throw Error(ErrorCode::invalid_argument, name, std::to_string(tokens),
                "-1 (open), or a number of tokens >= 0 besides the own one");
  }
  return tokens >= kUnlimited ? kOpen : tokens;
}

Mask within_left(int64_t window_left) { return q_pos() - kv_pos() <= window_left; }

}  // namespace

MaskValue q_pos() { return MaskValue(make_atom(Opcode::q_pos)); }
MaskValue kv_pos() { return MaskValue(make_atom(Opcode::kv_pos)); }
MaskValue q_head() { return MaskValue(make_atom(Opcode::q_head)); }
MaskValue request() { return MaskValue(make_atom(Opcode::request)); }
MaskValue q_len() { return MaskValue(make_atom(Opcode::q_len)); }
MaskValue kv_len() { return MaskValue(make_atom(Opcode::kv_len)); }
MaskValue operand(std::string name, OperandScope scope) {
  return MaskValue(mask_detail::make_operand(std::move(name), scope));
}

Mask everything() { return Mask(); }
Mask nothing() { return Mask(mask_detail::make_truth(false)); }
Mask causal() { return kv_pos() <= q_pos(); }

Mask window(int64_t window_left, int64_t window_right) {
  const int64_t left = checked_window("window_left", window_left);
  const int64_t right = checked_window("window_right", window_right);
  const auto within_right = [&] { return kv_pos() - q_pos() <= right; };
  if (left == kOpen && right == kOpen) return everything();
  if (left == kOpen) return within_right();
  if (right == kOpen) return within_left(left);
  return within_left(left) & within_right();
}

Mask sliding_window(int64_t num_tokens, bool bidirectional) {
  if (num_tokens < 1) {
    throw Error(ErrorCode::invalid_argument, "num_tokens", std::to_string(num_tokens),
                "at least 1: a sliding window counts the own token");
  }
  const int64_t besides_own = num_tokens - 1;
  return window(besides_own, bidirectional ? besides_own : 0);
}

Mask rswa(int64_t window_tokens) {
  if (window_tokens < 0) {
    throw Error(ErrorCode::invalid_argument, "window_tokens", std::to_string(window_tokens),
                "at least 0; 0 leaves the first prefix_len keys only");
  }
  const int64_t tokens = std::min(window_tokens, kUnlimited);
  return causal() & ((kv_pos() < operand("prefix_len", OperandScope::request)) | (q_pos() - kv_pos() < tokens));
}

Mask prefix_lm(int64_t window_left, bool clamp) {
  const int64_t left = checked_window("window_left", window_left);
  if (clamp && window_left == kOpen) {
    throw Error(ErrorCode::invalid_argument, "clamp", "true without a window", "true with window_left >= 0, or false");
  }
  Mask past = causal();
  Mask span =
      (operand("span_start", OperandScope::query) <= kv_pos()) & (kv_pos() <= operand("span_end", OperandScope::query));
  if (left != kOpen) past = past & within_left(left);
  if (left != kOpen && clamp) span = span & within_left(left);  // one-sided: the span's later keys stay visible
  return past | span;
}

Mask per_request_causal() { return (operand("causal", OperandScope::request) == 0) | causal(); }

Mask document() { return operand("query_document", OperandScope::query) == operand("key_document", OperandScope::key); }

Mask tree() {
  const MaskValue own_enter = operand("tree_enter", OperandScope::query);
  const Mask in_context = kv_pos() < kv_len() - q_len();
  const Mask is_ancestor = (operand("tree_enter", OperandScope::new_key) <= own_enter) &
                           (own_enter < operand("tree_leave", OperandScope::new_key));
  return in_context | is_ancestor;
}

}  // namespace qkv::mask
