// Single calls for those who only want a kernel. Same meaning and same checks as Attention.
#pragma once

#include <vector>

#include "qkv/attention.hpp"
#include "qkv/export.hpp"
#include "qkv/layer.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

struct VarlenArguments {
  Tensor query = {};  // [>= num_tokens, num_q_heads, head_dim]
  Tensor key = {};    // [num_keys, num_kv_heads, head_dim], or pages: [num_pages, page_size, num_kv_heads, head_dim]
  Tensor value = {};  // likewise with head_dim_v
  Tensor query_start_loc = {};  // i32 [num_requests + 1]
  Tensor seq_lens = {};         // i32 [num_requests]: keys of each request
  Tensor block_table = {};      // i32 [num_requests, max_pages], with pages; not given: dense keys, requests in a row
  Mask mask = {};               // not given: everything is visible
  std::vector<MaskOperand> mask_operands = {};
  std::optional<float> scale = {};  // not given: 1 / sqrt(head_dim)
  float softcap = 0;
  Tensor alibi_slopes = {};  // f32 [num_q_heads] or [num_requests, num_q_heads]
  Tensor sinks = {};         // f32 [num_q_heads]
  Tensor out = {};           // [>= num_tokens, num_q_heads, head_dim_v]
  Tensor lse = {};           // f32 [num_q_heads, >= num_tokens], if wanted
  Tensor key_scale = {};     // of 8-bit keys: f32, its shape as in KvScales
  Tensor value_scale = {};   // likewise
  Tensor out_scale = {};     // f32, with an out of 8-bit floats: its shape as in OutputScales
  Tensor query_scale = {};   // f32, with a query of 8-bit floats: its shape as in Attention::forward
  Stream stream = {};
};

QKV_EXPORT void varlen_attention(const VarlenArguments& arguments);

// A partial result over some keys: the softmax-weighted mean of their values and the natural log of the sum of exp.
struct State {
  Tensor out;  // [num_tokens, num_heads, head_dim_v], f32, f16 or bf16
  Tensor lse;  // f32 [num_heads, num_tokens]
};

// Joins states over disjoint keys, in the order given. A state with lse = -inf is empty: its out is not read, so NaN
// there cannot spread, and joining it to another leaves that one's bits alone. lse = +inf or NaN in a state gives NaN.
// `out` and `lse` may be those of a state. lse may be omitted. out_scale, with an `out` of 8-bit floats: f32
// of a shape as in OutputScales.
QKV_EXPORT void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse = {},
                             Stream stream = {}, const Tensor& out_scale = {});

// From an LSE in base 2 to the natural one, in place (f32, any shape).
QKV_EXPORT void lse_from_lse2(const Tensor& lse);

// Writes tokens to slots: see Attention::update_cache. slot_mapping: i64 [num_slots]. The cache's scales, if it has
// some, say by their shape what they belong to; not to requests, which are unknown here.
QKV_EXPORT void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, const Tensor& slot_mapping,
                            Stream stream = {});

enum class ScaleSource : uint8_t {
  given,   // read
  chosen,  // written: what puts the largest finite magnitude of the scale's rows at the format's largest number
};

QKV_EXPORT std::string_view to_string(ScaleSource source);

// Rounds rows to 8-bit floats, such as the queries of Attention::forward: out = round(rows / scale), to nearest even,
// beyond the largest number the largest number, NaN stays NaN. A scale that is chosen is 1 where its rows are zeros or
// none, and never below 2^-126; numbers that are not finite have no say in it.
//   rows [num_tokens, num_heads, head_dim]: f32, f16 or bf16; out: likewise, of 8-bit floats
//   scale f32 [1], [num_scales] or [num_requests, num_scales], any strides: a scale serves num_heads / num_scales
//   neighbouring heads, so that num_kv_heads of them are the query_scale of forward
//   query_start_loc i32 [num_requests + 1] on the device of rows, with scales of requests and no others. Like scales it
//   is read when the work runs. Rows past query_start_loc[num_requests]: untouched
QKV_EXPORT void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
                         const Tensor& query_start_loc = {}, Stream stream = {});

// Copies cached tokens to dense rows: row cu_seq_lens[i] + t is token starts[i] + t of request i. Starts
// need not be aligned to pages. Only the block table's entries for these tokens are read.
//   pages [num_pages, page_size, num_heads, head_dim] or, of latents, [num_pages, page_size, head_dim]
//   block_table i32 [num_requests, max_pages], starts i32 [num_requests], cu_seq_lens i32 [num_requests + 1]
//   rows [>= cu_seq_lens[num_requests], num_heads, head_dim] or [>= …, head_dim], of the pages' dtype: bits are kept;
//     or of f32, f16 or bf16 where pages are 8-bit
//   scale f32 [1], where 8-bit pages are widened, and nowhere else: rows are round(element · scale)
QKV_EXPORT void gather_cache(const Tensor& pages, const Tensor& block_table, const Tensor& starts,
                             const Tensor& cu_seq_lens, const Tensor& rows, Stream stream = {},
                             const Tensor& scale = {});

}  // namespace qkv
