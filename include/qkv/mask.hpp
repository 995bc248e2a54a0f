// Masks as algebra: who sees whom is a small expression over positions, heads, requests and per-batch operands.
// The library evaluates it, classifies tiles by interval arithmetic, hashes it, prints it and draws it.
//
//   Mask m = mask::causal() & mask::window(127, 0);
//   Mask m = mask::kv_pos() <= mask::q_pos();
//   Mask m = parse_mask("kv_pos <= q_pos & (kv_pos < prefix_len[request] | q_pos - kv_pos < 64)");
//
// Positions are absolute within a request: query i of a request with q_len new and kv_len total tokens has
// q_pos = i + kv_len - q_len, key j has kv_pos = j. Arithmetic is exact: an expression in which a sum could leave
// +-2^60 is refused, as are more than 256 operations nested in each other and more than 10000 in all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/export.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

// Where an operand's value is looked up.
//   request   one value a request                                   [num_requests]    name[request]
//   query     one value a new token, read at the query              [num_tokens]      name[query]
//   new_key   the same array, read at the key: 0 for keys of the
//             context, that is, those before the request's new tokens                 name[new_key]
//   key       one value a key token, requests one after another     [sum of seq_lens] name[key]
enum class OperandScope : uint8_t { request, query, new_key, key };

namespace mask_detail {
struct Node;
using NodePtr = std::shared_ptr<const Node>;
}  // namespace mask_detail

// An integer-valued expression.
class QKV_EXPORT MaskValue {
 public:
  MaskValue(int64_t constant);  // NOLINT(google-explicit-constructor): constants mix with expressions
  explicit MaskValue(mask_detail::NodePtr node) : node_(std::move(node)) {}
  const mask_detail::NodePtr& node() const { return node_; }
  std::string text() const;

 private:
  mask_detail::NodePtr node_;
};

// A truth-valued expression: true where the query sees the key.
class QKV_EXPORT Mask {
 public:
  Mask();  // everything is visible
  explicit Mask(mask_detail::NodePtr node) : node_(std::move(node)) {}
  const mask_detail::NodePtr& node() const { return node_; }

  // Canonical text, built-ins expanded and a > b written as b < a; parse_mask(m.text()) has the same text and hash.
  std::string text() const;
  // Stable across processes and versions: a hash of the canonical text.
  uint64_t hash() const;

 private:
  mask_detail::NodePtr node_;
};

QKV_EXPORT MaskValue operator+(const MaskValue& a, const MaskValue& b);
QKV_EXPORT MaskValue operator-(const MaskValue& a, const MaskValue& b);
QKV_EXPORT Mask operator<(const MaskValue& a, const MaskValue& b);
QKV_EXPORT Mask operator<=(const MaskValue& a, const MaskValue& b);
QKV_EXPORT Mask operator>(const MaskValue& a, const MaskValue& b);
QKV_EXPORT Mask operator>=(const MaskValue& a, const MaskValue& b);
QKV_EXPORT Mask operator==(const MaskValue& a, const MaskValue& b);
QKV_EXPORT Mask operator!=(const MaskValue& a, const MaskValue& b);
QKV_EXPORT Mask operator&(const Mask& a, const Mask& b);
QKV_EXPORT Mask operator|(const Mask& a, const Mask& b);
QKV_EXPORT Mask operator~(const Mask& a);

namespace mask {

// Atoms.
QKV_EXPORT MaskValue q_pos();
QKV_EXPORT MaskValue kv_pos();
QKV_EXPORT MaskValue q_head();
QKV_EXPORT MaskValue request();
QKV_EXPORT MaskValue q_len();   // new tokens of the request
QKV_EXPORT MaskValue kv_len();  // all keys of the request
QKV_EXPORT MaskValue operand(std::string name, OperandScope scope);

// Built-ins: definitions in this language, nothing else.
QKV_EXPORT Mask everything();
QKV_EXPORT Mask nothing();
// kv_pos <= q_pos: bottom-right aligned, the last query sees the last key.
QKV_EXPORT Mask causal();
// Keys seen besides the own one on each side; -1 leaves a side open, as does 2^31-1 or more; 0 for both keeps the own
// token only.
QKV_EXPORT Mask window(int64_t window_left, int64_t window_right);
// What a model card calls "sliding window of N tokens": the own token and the N-1 before it (and, for
// bidirectional attention, the N-1 after it). The one place where model windows become kernel windows.
QKV_EXPORT Mask sliding_window(int64_t num_tokens, bool bidirectional = false);
// Reference sliding window: the request's first prefix_len[request] keys and the last `window_tokens` ones.
// Operand: prefix_len[request].
QKV_EXPORT Mask rswa(int64_t window_tokens);
// Causal (within window_left, if >= 0), and bidirectional inside the span of the query's token, inclusive ends.
// `clamp` also cuts keys of the span that lie behind the window, and needs one.
// Operands: span_start[query], span_end[query]; (-1, -1) = no span. fill_prefix_lm_spans() makes them.
QKV_EXPORT Mask prefix_lm(int64_t window_left = -1, bool clamp = false);
// Causal where causal[request] is not 0, everything elsewhere. Operand: causal[request].
QKV_EXPORT Mask per_request_causal();
// Packed documents: a query sees the keys of its own document. Operands: query_document[query], key_document[key].
QKV_EXPORT Mask document();
// Speculative token trees. All context is visible; of the new tokens, a query sees itself and its ancestors: those
// with enter <= own enter < leave, in the numbering of a depth-first walk. Operands: tree_enter[query and new_key],
// tree_leave[new_key]. fill_tree() makes them from parent indices.
QKV_EXPORT Mask tree();

}  // namespace mask

// Reads the text form: integers; q_pos kv_pos q_head request q_len kv_len; name[request|query|new_key|key];
// + - < <= > >= == != & | ~ ( ); true, false; and the built-ins as calls, for example
// "causal & window(127, 0)". Comparisons bind tighter than ~, which binds tighter than &, then |.
// Throws Error with the position and what was expected.
QKV_EXPORT Mask parse_mask(std::string_view text);

// One operand that a mask names, with its values for this batch.
struct MaskOperand {
  std::string name;
  Tensor values;  // i32, rank 1, contiguous; length as OperandScope says
};

struct OperandDeclaration {
  std::string name;
  OperandScope scope;  // query stands for query and new_key: they read the same array
  bool operator==(const OperandDeclaration&) const = default;
};

// The operands that a batch must supply for this mask, in order of name.
QKV_EXPORT std::vector<OperandDeclaration> operands_of(const Mask& mask);

// Everything that fixes the truth of all pairs of one request.
struct MaskScene {
  int32_t request = 0;  // index used for name[request]
  int32_t q_head = 0;
  int32_t q_len = 0;
  int32_t kv_len = 0;
  int64_t query_start = 0;  // offset of the request's first new token in arrays of scope query
  int64_t key_start = 0;    // offset of the request's first key in arrays of scope key
  std::vector<MaskOperand> operands;
};

// The truth of one pair: query `query` (0 … q_len-1) and key `kv_pos` (0 … kv_len-1). The definition that tile
// classes, vector code and GPU code are held against.
QKV_EXPORT bool is_visible(const Mask& mask, const MaskScene& scene, int32_t query, int32_t kv_pos);

enum class TileClass : uint8_t { empty, partial, full };
QKV_EXPORT std::string_view to_string(TileClass tile_class);

// The class of the tile queries [query_begin, query_end) x keys [kv_begin, kv_end), by interval arithmetic: empty and
// full are proofs, partial may be neither.
QKV_EXPORT TileClass classify_tile(const Mask& mask, const MaskScene& scene, int32_t query_begin, int32_t query_end,
                                   int32_t kv_begin, int32_t kv_end);

// One character a pair ('#' visible, '.' hidden), one line a query; tiles are separated where tile sizes are given,
// and each tile's class is shown at its corner (' ' empty, '+' partial, '=' full).
QKV_EXPORT std::string draw_mask_text(const Mask& mask, const MaskScene& scene, int32_t tile_q = 0,
                                      int32_t tile_kv = 0);
// The same as a PNG file: visible pairs dark, tiles tinted by class.
QKV_EXPORT void draw_mask_png(const Mask& mask, const MaskScene& scene, const std::string& path, int32_t tile_q = 0,
                              int32_t tile_kv = 0);

// --- makers of mask operands ---

// A bidirectional span of a request, in absolute positions, inclusive.
struct PrefixLmSpan {
  int32_t request;
  int32_t start;
  int32_t end;
};

struct PrefixLmOperands {
  std::vector<int32_t> span_start;  // [num_tokens]
  std::vector<int32_t> span_end;    // [num_tokens]
};

// The span of each new token, absolute and unclipped; -1 where there is none. Spans of one token do nothing.
// Overlapping spans of one request are refused.
QKV_EXPORT PrefixLmOperands fill_prefix_lm_spans(const std::vector<PrefixLmSpan>& spans, const Tensor& query_start_loc,
                                                 const Tensor& seq_lens);

struct TreeOperands {
  std::vector<int32_t> tree_enter;  // [num_tokens]
  std::vector<int32_t> tree_leave;  // [num_tokens]
};

// parents[t] is the index, within its request's new tokens, of the parent of token t; -1 for a root. Parents come
// before their children.
QKV_EXPORT TreeOperands fill_tree(const std::vector<int32_t>& parents, const Tensor& query_start_loc);

}  // namespace qkv
