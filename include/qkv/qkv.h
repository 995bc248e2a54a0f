// The C interface: the C++ interface under the same names, for engines written in C, Rust, Go, Zig. See docs/c_api.md.
//
// - A call returns QKV_OK, or a code; the sentence is then kept for the thread: qkv_last_error_message().
// - A tensor pointer may be NULL where the tensor may be left out: NULL and a tensor of rank 0 mean "not given".
// - Text goes into a buffer of the caller's: at most `capacity` bytes, the final 0 included, and *needed (if not NULL)
//   is what the whole text needs. A text cut short is no error. NULL with capacity 0 only asks for the size.
// - Enumerations are int32_t and truth values are int32_t 0 or 1, so that no compiler decides on the layout.
#pragma once

#include <stddef.h>
#include <stdint.h>

// The same line as in export.hpp: this header includes no C++.
#define QKV_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// --- status ---------------------------------------------------------------------------------------------------------

typedef int32_t qkv_status;
enum {
  QKV_OK = 0,
  QKV_INVALID_ARGUMENT = 1,  // a value that no call accepts; also a NULL where something is needed
  QKV_MISMATCH = 2,          // two arguments that do not belong together
  QKV_UNSUPPORTED = 3,       // a sensible request that this build or device does not do
  QKV_UNAVAILABLE = 4,       // a device, library or file that is not there
  QKV_INTERNAL = 5,          // a broken invariant of the library: please report it
  QKV_OUT_OF_MEMORY = 100
};

// "ok", "invalid_argument", …; "unknown" for a number that is none of them. Never NULL.
QKV_EXPORT const char* qkv_status_name(qkv_status status);

// The last call of this thread that failed. The strings are never NULL, empty before the first failure, and valid until
// the thread's next failure; calls that succeed leave them alone.
QKV_EXPORT qkv_status qkv_last_error_status(void);
QKV_EXPORT const char* qkv_last_error_message(void);  // "argument: got VALUE; allowed: ALLOWED" on one line
QKV_EXPORT const char* qkv_last_error_argument(void);
QKV_EXPORT const char* qkv_last_error_value(void);
QKV_EXPORT const char* qkv_last_error_allowed(void);

// --- tensors --------------------------------------------------------------------------------------------------------

typedef int32_t qkv_dtype;
enum { QKV_F32 = 0, QKV_F16 = 1, QKV_BF16 = 2, QKV_F8E4M3 = 3, QKV_I32 = 4, QKV_I64 = 5, QKV_F8E5M2 = 6, QKV_I8 = 7 };

typedef int32_t qkv_device_kind;
enum { QKV_CPU = 0, QKV_CUDA = 1 };

typedef struct qkv_device {
  qkv_device_kind kind;
  int32_t index;
} qkv_device;

enum { QKV_MAX_RANK = 5 };

// A strided view of memory that the caller owns. Strides count elements. All zero = not given. Tensors that a call only
// reads are never written through.
typedef struct qkv_tensor {
  void* data;
  qkv_dtype dtype;
  qkv_device device;
  int32_t rank;
  int64_t shape[QKV_MAX_RANK];
  int64_t stride[QKV_MAX_RANK];
} qkv_tensor;

// A row-major view of memory of the CPU. With a rank outside of 1 … 5 or a NULL shape, the view is one that every call
// refuses by its rank.
QKV_EXPORT qkv_tensor qkv_tensor_contiguous(const void* data, qkv_dtype dtype, int32_t rank, const int64_t* shape);

// --- streams --------------------------------------------------------------------------------------------------------

// A CUstream or cudaStream_t of the caller's, on which a call's work on a GPU is ordered: the last parameter of every
// call that has such work. NULL is CUDA's default stream. The CPU engine ignores it.
typedef void* qkv_stream;

// --- layers ---------------------------------------------------------------------------------------------------------
// Structs with struct_size grow at their end, and 0 in a new field means what was the case before it: programs and
// libraries of different versions understand each other. Set it to sizeof and the rest to 0, or call the init function.

typedef int32_t qkv_attention_type;
enum { QKV_DECODER = 0, QKV_ENCODER_ONLY = 1, QKV_ENCODER = 2, QKV_ENCODER_DECODER = 3 };

// What has a scale of its own in 8-bit keys and values.
typedef int32_t qkv_kv_scales;
enum {
  QKV_SCALES_NONE = 0,              // of 16- and 32-bit floats
  QKV_SCALES_PER_TENSOR = 1,        // [1]
  QKV_SCALES_PER_HEAD = 2,          // [num_kv_heads]
  QKV_SCALES_PER_REQUEST_HEAD = 3,  // [num_requests, num_kv_heads]
  QKV_SCALES_PER_TOKEN_HEAD = 4     // [num_pages, page_size, num_kv_heads]; dense: [num_keys, num_kv_heads, 1]
};

// What has a scale of its own in an output of 8-bit floats.
typedef int32_t qkv_output_scales;
enum {
  QKV_OUTPUT_SCALES_PER_TENSOR = 0,      // [1], given
  QKV_OUTPUT_SCALES_PER_TOKEN_GROUP = 1  // [>= num_tokens, num_q_heads, ceil(head_dim_v / 128)], chosen and written
};

// Which of a request's keys a layer is shown.
typedef int32_t qkv_key_run;
enum { QKV_KEYS_ALL = 0, QKV_KEYS_CONTEXT = 1, QKV_KEYS_NEW_TOKENS = 2 };

// Ranks that share a cache: runs of interleave_size tokens go round the ranks, rank 0 first.
typedef struct qkv_shard {
  int32_t rank;
  int32_t num_ranks;        // 0 = 1
  int32_t interleave_size;  // divides page_size; 0 = 1
} qkv_shard;

// What a layer is; meanings and ranges as in layer.hpp. 0 is the default of all but struct_size and the sizes.
typedef struct qkv_layer_spec {
  size_t struct_size;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t head_dim_v;  // 0 = head_dim
  qkv_dtype query_dtype;
  qkv_dtype kv_dtype;
  qkv_kv_scales kv_scales;   // of 8-bit keys and values
  int32_t has_output_dtype;  // 0: query_dtype, or bf16 if that is 8-bit
  qkv_dtype output_dtype;
  qkv_attention_type type;
  int32_t has_cache;  // 0: keys and values are dense tensors
  int32_t page_size;  // of the cache
  const char* mask;   // text as parse_mask in mask.hpp reads it: "causal & window(127, 0)". NULL: the type's default
  int32_t has_scale;  // 0: 1 / sqrt(head_dim)
  float scale;
  float softcap;              // 0 = off
  int32_t alibi_per_request;  // slopes come with the batch
  const float* alibi_slopes;  // [num_alibi_slopes]
  int64_t num_alibi_slopes;   // num_q_heads; 0 = none
  const float* sinks;         // [num_sinks]
  int64_t num_sinks;          // num_q_heads; 0 = none
  qkv_key_run key_run;
  qkv_shard shard;
  qkv_output_scales output_scales;
  int32_t reserved;  // 0
} qkv_layer_spec;

// All 0, struct_size as given, which must be the caller's sizeof(qkv_layer_spec). Nothing happens to NULL.
QKV_EXPORT void qkv_layer_spec_init(qkv_layer_spec* spec, size_t struct_size);

// Why the layer cannot run on the device, a reason a line; an empty text (*needed = 1) says that it can. A spec that
// cannot be read, for example for its mask's text, is an error instead.
QKV_EXPORT qkv_status qkv_explain(const qkv_layer_spec* spec, qkv_device device, char* text, size_t capacity,
                                  size_t* needed);
// The table of what goes with what.
QKV_EXPORT qkv_status qkv_support_matrix(qkv_device_kind device, char* text, size_t capacity, size_t* needed);

// --- masks ----------------------------------------------------------------------------------------------------------

// Reads the mask and forgets it: an error says where the text goes wrong.
QKV_EXPORT qkv_status qkv_mask_check(const char* mask);
// The canonical text, built-ins expanded.
QKV_EXPORT qkv_status qkv_mask_text(const char* mask, char* text, size_t capacity, size_t* needed);
// The hash of the canonical text: the same in all processes and versions.
QKV_EXPORT qkv_status qkv_mask_hash(const char* mask, uint64_t* hash);

// The values of one operand that a mask names: i32, rank 1.
typedef struct qkv_mask_operand {
  const char* name;
  qkv_tensor values;
} qkv_mask_operand;

// A bidirectional span of a request, in absolute positions, both inclusive.
typedef struct qkv_prefix_lm_span {
  int32_t request;
  int32_t start;
  int32_t end;
} qkv_prefix_lm_span;

// The operands of prefix_lm: span_start and span_end [num_tokens]; num_tokens is the last of query_start_loc.
QKV_EXPORT qkv_status qkv_fill_prefix_lm_spans(const qkv_prefix_lm_span* spans, int64_t num_spans,
                                               const qkv_tensor* query_start_loc, const qkv_tensor* seq_lens,
                                               int32_t* span_start, int32_t* span_end, int64_t num_tokens);
// The operands of tree: tree_enter and tree_leave [num_tokens], from parents [num_tokens], -1 for a root.
QKV_EXPORT qkv_status qkv_fill_tree(const int32_t* parents, const qkv_tensor* query_start_loc, int32_t* tree_enter,
                                    int32_t* tree_leave, int64_t num_tokens);

// --- a step: attention (once a layer) -> plan (once a step) -> update_cache, forward (each layer) -------------------

// Requests whose first keys are the same, in the same pages.
typedef struct qkv_prefix_group {
  const int32_t* requests;  // [num_requests]: numbers in the batch
  int64_t num_requests;
  int32_t num_tokens;  // how many of their first keys
} qkv_prefix_group;

typedef int32_t qkv_prefix_sharing;
enum { QKV_SHARING_AUTOMATIC = 0, QKV_SHARING_ALWAYS = 1, QKV_SHARING_OFF = 2 };

// One step's requests; meanings as in batch.hpp.
typedef struct qkv_batch {
  size_t struct_size;
  qkv_tensor query_start_loc;             // i32 [num_requests + 1]
  qkv_tensor seq_lens;                    // i32 [num_requests]
  qkv_tensor block_table;                 // i32 [num_requests, max_pages]; layers with a cache
  qkv_tensor slot_mapping;                // i64 [num_written_tokens]; for update_cache
  const qkv_mask_operand* mask_operands;  // [num_mask_operands]
  int64_t num_mask_operands;
  qkv_tensor alibi_slopes;  // f32 [num_requests, num_q_heads]; layers with alibi_per_request
  qkv_prefix_sharing prefix_sharing;
  int32_t prefix_sharing_changes_bits;    // 1: sharing may take a quicker kernel, whose results agree within rounding
  const qkv_prefix_group* prefix_groups;  // [num_prefix_groups]
  int64_t num_prefix_groups;              // 0: the planner finds them
} qkv_batch;

QKV_EXPORT void qkv_batch_init(qkv_batch* batch, size_t struct_size);

// A layer's paged cache as two views of any strides (the last axis must be contiguous).
typedef struct qkv_kv_cache {
  qkv_tensor key;        // kv_dtype [num_pages, page_size, num_kv_heads, head_dim]
  qkv_tensor value;      // kv_dtype [num_pages, page_size, num_kv_heads, head_dim_v]
  qkv_tensor key_scale;  // f32, of 8-bit caches and no others: its shape as kv_scales says
  qkv_tensor value_scale;
} qkv_kv_cache;

// Views of one tensor [num_pages, num_kv_heads, page_size, head_dim + head_dim_v], of any strides.
QKV_EXPORT qkv_status qkv_kv_cache_from_interleaved(const qkv_tensor* key_value, int32_t head_dim, qkv_kv_cache* cache);

typedef struct qkv_attention qkv_attention;
typedef struct qkv_plan qkv_plan;

// On failure *attention is NULL, and the error's `allowed` holds all of qkv_explain's reasons. Nothing of the spec is
// kept by address.
QKV_EXPORT qkv_status qkv_attention_create(const qkv_layer_spec* spec, qkv_device device, qkv_attention** attention);
QKV_EXPORT void qkv_attention_destroy(qkv_attention* attention);  // NULL is fine

// The plan holds copies of the index arrays. It fits every layer whose spec differs only in sinks, slopes and scales'
// values, and outlives the attention that made it. On failure *plan is NULL.
// On a GPU the batch's arrays are host arrays, the plan is copied on the stream, and it must not be destroyed before
// the work that uses it has run.
QKV_EXPORT qkv_status qkv_attention_plan(const qkv_attention* attention, const qkv_batch* batch, qkv_plan** plan,
                                         qkv_stream stream);
QKV_EXPORT void qkv_plan_destroy(qkv_plan* plan);  // NULL is fine

QKV_EXPORT qkv_status qkv_plan_num_requests(const qkv_plan* plan, int32_t* num_requests);
QKV_EXPORT qkv_status qkv_plan_num_tokens(const qkv_plan* plan, int64_t* num_tokens);
QKV_EXPORT qkv_status qkv_plan_num_work_items(const qkv_plan* plan, int64_t* num_work_items);
QKV_EXPORT qkv_status qkv_plan_workspace_bytes(const qkv_plan* plan, int64_t* workspace_bytes);
QKV_EXPORT qkv_status qkv_plan_dump(const qkv_plan* plan, char* text, size_t capacity, size_t* needed);

// The largest batch of a planner; meanings as in planner.hpp.
typedef struct qkv_plan_limits {
  size_t struct_size;
  int32_t max_requests;
  int64_t max_tokens;
  int32_t max_query_len;  // 0 = max_tokens
  int32_t max_seq_len;
  int64_t max_keys;         // 0 = max_requests·max_seq_len
  int32_t num_pages;        // of the cache; 0 for layers without one
  int32_t plans_on_device;  // batches may come as arrays on the device
} qkv_plan_limits;

QKV_EXPORT void qkv_plan_limits_init(qkv_plan_limits* limits, size_t struct_size);

// Plans in memory that is made once, for steps that are captured in a CUDA graph and replayed with other batches.
typedef struct qkv_planner qkv_planner;

// `workspace`: qkv_attention_workspace_bytes bytes on the device, or NULL: the planner has its own.
QKV_EXPORT qkv_status qkv_attention_planner(const qkv_attention* attention, const qkv_plan_limits* limits,
                                            const qkv_tensor* workspace, qkv_planner** planner);
QKV_EXPORT qkv_status qkv_attention_workspace_bytes(const qkv_attention* attention, const qkv_plan_limits* limits,
                                                    int64_t* workspace_bytes);
QKV_EXPORT void qkv_planner_destroy(qkv_planner* planner);  // NULL is fine; its plans live on
// In place of the planner's plan before, which is refused from now on. On failure *plan is NULL.
QKV_EXPORT qkv_status qkv_planner_plan(qkv_planner* planner, const qkv_batch* batch, qkv_plan** plan,
                                       qkv_stream stream);
// Waits for the stream, and fails if the batch that was last planned on the device exceeded the limits.
QKV_EXPORT qkv_status qkv_planner_check(const qkv_planner* planner, qkv_stream stream);
// The newest batch on other pages and slots (NULL: none). On failure *plan is NULL.
QKV_EXPORT qkv_status qkv_planner_update_block_table(qkv_planner* planner, const qkv_tensor* block_table,
                                                     const qkv_tensor* slot_mapping, qkv_plan** plan,
                                                     qkv_stream stream);

// Writes the new tokens to their slots.
//   key [>= num_slots, num_kv_heads, head_dim], value [>= num_slots, num_kv_heads, head_dim_v]: f32, f16 or bf16
QKV_EXPORT qkv_status qkv_attention_update_cache(const qkv_attention* attention, const qkv_tensor* key,
                                                 const qkv_tensor* value, const qkv_kv_cache* cache,
                                                 const qkv_plan* plan, qkv_stream stream);
// Layers with a cache. query [>= num_tokens, num_q_heads, head_dim], out [>= num_tokens, num_q_heads, head_dim_v],
// lse f32 [num_q_heads, >= num_tokens] or NULL, out_scale f32 of the shape of the layer's output_scales for an out of
// 8-bit floats, else NULL, query_scale f32 [1], [num_kv_heads] or [num_requests, num_kv_heads] for a query of 8-bit
// floats, else NULL.
QKV_EXPORT qkv_status qkv_attention_forward(const qkv_attention* attention, const qkv_tensor* query,
                                            const qkv_kv_cache* cache, const qkv_plan* plan, const qkv_tensor* out,
                                            const qkv_tensor* lse, const qkv_tensor* out_scale,
                                            const qkv_tensor* query_scale, qkv_stream stream);
// Layers without one. key [sum of seq_lens, num_kv_heads, head_dim], value likewise with head_dim_v; key_scale and
// value_scale f32 of the shape of the layer's kv_scales for 8-bit ones, else NULL.
QKV_EXPORT qkv_status qkv_attention_forward_dense(const qkv_attention* attention, const qkv_tensor* query,
                                                  const qkv_tensor* key, const qkv_tensor* value, const qkv_plan* plan,
                                                  const qkv_tensor* out, const qkv_tensor* lse,
                                                  const qkv_tensor* out_scale, const qkv_tensor* query_scale,
                                                  const qkv_tensor* key_scale, const qkv_tensor* value_scale,
                                                  qkv_stream stream);

// --- single calls ---------------------------------------------------------------------------------------------------

// As in ops.hpp.
typedef struct qkv_varlen_arguments {
  size_t struct_size;
  qkv_tensor query;
  qkv_tensor key;  // dense or, with block_table, pages
  qkv_tensor value;
  qkv_tensor query_start_loc;
  qkv_tensor seq_lens;
  qkv_tensor block_table;
  const char* mask;  // NULL: everything is visible
  const qkv_mask_operand* mask_operands;
  int64_t num_mask_operands;
  int32_t has_scale;  // 0: 1 / sqrt(head_dim)
  float scale;
  float softcap;
  qkv_tensor alibi_slopes;  // f32 [num_q_heads] or [num_requests, num_q_heads]
  qkv_tensor sinks;         // f32 [num_q_heads]
  qkv_tensor out;
  qkv_tensor lse;
  qkv_stream stream;
  qkv_tensor key_scale;  // of 8-bit keys: f32, its shape says what has a scale of its own
  qkv_tensor value_scale;
  qkv_tensor out_scale;    // f32, with an out of 8-bit floats: its shape as in qkv_output_scales
  qkv_tensor query_scale;  // f32, with a query of 8-bit floats: its shape as in qkv_attention_forward
} qkv_varlen_arguments;

QKV_EXPORT void qkv_varlen_arguments_init(qkv_varlen_arguments* arguments, size_t struct_size);
QKV_EXPORT qkv_status qkv_varlen_attention(const qkv_varlen_arguments* arguments);

// A partial result over some keys.
typedef struct qkv_state {
  qkv_tensor out;  // [num_tokens, num_heads, head_dim_v]
  qkv_tensor lse;  // f32 [num_heads, num_tokens]
} qkv_state;

// Joins states over disjoint keys in the order given. lse may be NULL; out_scale, with an out of 8-bit floats,
// f32 of a shape as in qkv_output_scales.
QKV_EXPORT qkv_status qkv_merge_states(const qkv_state* states, int64_t num_states, const qkv_tensor* out,
                                       const qkv_tensor* lse, const qkv_tensor* out_scale, qkv_stream stream);
// From an LSE in base 2 to the natural one, in place.
QKV_EXPORT qkv_status qkv_lse_from_lse2(const qkv_tensor* lse);
// Slots of the batch's new tokens on a rank, -1 where another rank keeps the token: from query_start_loc, seq_lens and
// the rank's block_table, as shard_slots in shard.hpp. `slots` [num_slots], as many as the batch has new tokens.
QKV_EXPORT qkv_status qkv_shard_slots(const qkv_batch* batch, int32_t page_size, const qkv_shard* shard, int64_t* slots,
                                      int64_t num_slots);
// Writes tokens to slots without a plan. slot_mapping: i64 [num_slots].
QKV_EXPORT qkv_status qkv_cache_write(const qkv_tensor* key, const qkv_tensor* value, const qkv_kv_cache* cache,
                                      const qkv_tensor* slot_mapping, qkv_stream stream);

// Where the scales of qkv_quantise come from.
typedef int32_t qkv_scale_source;
enum {
  QKV_SCALES_GIVEN = 0,  // read
  QKV_SCALES_CHOSEN = 1  // written
};
// Rounds rows [num_tokens, num_heads, head_dim] to 8-bit floats, such as queries. As in ops.hpp; query_start_loc
// i32 [num_requests + 1] where scales are of requests, else NULL.
QKV_EXPORT qkv_status qkv_quantise(const qkv_tensor* rows, const qkv_tensor* out, const qkv_tensor* scale,
                                   qkv_scale_source source, const qkv_tensor* query_start_loc, qkv_stream stream);

// Copies cached tokens to dense rows: row cu_seq_lens[i] + t is token starts[i] + t of request i. As in ops.hpp; scale
// f32 [1] where 8-bit pages become rows of others, else NULL.
QKV_EXPORT qkv_status qkv_gather_cache(const qkv_tensor* pages, const qkv_tensor* block_table, const qkv_tensor* starts,
                                       const qkv_tensor* cu_seq_lens, const qkv_tensor* rows, const qkv_tensor* scale,
                                       qkv_stream stream);

// --- prefill of multi-head latent attention: as in mla_prefill.hpp and context_chunks.hpp ---------------------------

typedef struct qkv_mla_spec {
  size_t struct_size;
  int32_t num_heads;
  int32_t qk_nope_head_dim;
  int32_t qk_rope_head_dim;
  int32_t v_head_dim;
  int32_t kv_lora_rank;
  qkv_dtype dtype;
  int32_t page_size;         // of the latent cache
  int32_t has_output_dtype;  // 0: dtype
  qkv_dtype output_dtype;
  const char* mask;   // NULL: causal
  int32_t has_scale;  // 0: 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)
  float scale;
  float softcap;       // 0 = off
  const float* sinks;  // [num_sinks]
  int64_t num_sinks;   // num_heads; 0 = none
  qkv_output_scales output_scales;
  int32_t has_cache_dtype;  // 0: dtype
  qkv_dtype cache_dtype;
  int32_t reserved;  // 0
} qkv_mla_spec;

QKV_EXPORT void qkv_mla_spec_init(qkv_mla_spec* spec, size_t struct_size);
// A reason a line, as qkv_explain.
QKV_EXPORT qkv_status qkv_mla_explain(const qkv_mla_spec* spec, qkv_device device, char* text, size_t capacity,
                                      size_t* needed);

typedef struct qkv_context_chunk_options {
  size_t struct_size;
  int32_t workspace_tokens;
  int32_t page_size;
  int32_t num_ranks;        // 0 = 1
  int32_t interleave_size;  // 0 = 1
  int32_t batch_invariant;
  int32_t rank;  // whose block table the batch has
} qkv_context_chunk_options;

QKV_EXPORT void qkv_context_chunk_options_init(qkv_context_chunk_options* options, size_t struct_size);
QKV_EXPORT qkv_status qkv_default_workspace_tokens(const qkv_context_chunk_options* options, int64_t max_model_len,
                                                   int64_t max_num_requests, int32_t* workspace_tokens);

// A chunk of a plan, which owns the arrays. Those of ranks are NULL with one rank.
typedef struct qkv_context_chunk {
  int32_t index;
  int32_t request_begin, request_end;
  int32_t token_begin, token_end;
  int32_t is_continuation;
  int32_t continuation_token_end;
  int32_t num_context_tokens;
  int32_t max_query_len;
  int32_t max_seq_len;
  const int32_t* query_start_loc;           // [num_requests + 1]
  const int32_t* cu_seq_lens;               // [num_requests + 1]
  const int32_t* starts;                    // [num_requests]
  const int32_t* seq_lens;                  // [num_requests]
  const int32_t* token_to_seq;              // [num_context_tokens]
  const int32_t* local_seq_lens;            // [num_requests, num_ranks]
  const int32_t* padded_local_seq_lens;     // [num_requests]
  const int32_t* padded_local_cu_seq_lens;  // [num_requests + 1]
  const int32_t* local_starts;              // [num_requests]
  const int32_t* all_gathered_rows;         // [num_context_tokens]
} qkv_context_chunk;

typedef struct qkv_collectives qkv_collectives;  // below
typedef struct qkv_mla_prefill qkv_mla_prefill;
typedef struct qkv_mla_plan qkv_mla_plan;
typedef struct qkv_projection qkv_projection;

// Fills key_nope and value from latents, on the stream; a result other than 0 fails the call that asked for it.
typedef int32_t (*qkv_project)(void* context, const qkv_tensor* latents, const qkv_tensor* key_nope,
                               const qkv_tensor* value, qkv_stream stream);

// By a matrix, which must stay where it is, or by the caller's own function. On failure *projection is NULL.
QKV_EXPORT qkv_status qkv_matrix_projection_create(const qkv_mla_spec* spec, const qkv_tensor* kv_b_proj,
                                                   qkv_projection** projection);
QKV_EXPORT qkv_status qkv_projection_create(qkv_project project, void* context, qkv_projection** projection);
QKV_EXPORT void qkv_projection_destroy(qkv_projection* projection);  // NULL is fine

// One may serve several threads and micro-batches at once: what changes from call to call lies in plans and tensors.
QKV_EXPORT qkv_status qkv_mla_prefill_create(const qkv_mla_spec* spec, qkv_device device, qkv_mla_prefill** prefill);
QKV_EXPORT void qkv_mla_prefill_destroy(qkv_mla_prefill* prefill);  // NULL is fine
QKV_EXPORT qkv_status qkv_mla_prefill_workspace_bytes(const qkv_mla_prefill* prefill, int64_t max_new_tokens,
                                                      int64_t workspace_tokens, int32_t num_ranks, int64_t* bytes);

QKV_EXPORT qkv_status qkv_mla_prefill_plan(const qkv_mla_prefill* prefill, const qkv_batch* batch,
                                           const qkv_context_chunk_options* options, qkv_mla_plan** plan,
                                           qkv_stream stream);
QKV_EXPORT void qkv_mla_plan_destroy(qkv_mla_plan* plan);  // NULL is fine
QKV_EXPORT qkv_status qkv_mla_plan_num_tokens(const qkv_mla_plan* plan, int64_t* num_tokens);
QKV_EXPORT qkv_status qkv_mla_plan_num_chunks(const qkv_mla_plan* plan, int32_t* num_chunks);
QKV_EXPORT qkv_status qkv_mla_plan_chunk(const qkv_mla_plan* plan, int32_t index, qkv_context_chunk* chunk);
QKV_EXPORT qkv_status qkv_mla_plan_workspace_bytes(const qkv_mla_plan* plan, int64_t* bytes);

// out_scale, and `out` of qkv_mla_merge_context, for outputs of 8-bit floats; latent_scale for such a cache; else NULL.
QKV_EXPORT qkv_status qkv_mla_run_new_tokens(const qkv_mla_prefill* prefill, const qkv_tensor* query,
                                             const qkv_tensor* key, const qkv_tensor* value, const qkv_mla_plan* plan,
                                             const qkv_tensor* out, const qkv_tensor* lse, const qkv_tensor* out_scale,
                                             qkv_stream stream);
QKV_EXPORT qkv_status qkv_mla_run_context_chunk(const qkv_mla_prefill* prefill, int32_t chunk, const qkv_tensor* query,
                                                const qkv_tensor* key, const qkv_tensor* value,
                                                const qkv_mla_plan* plan, const qkv_tensor* out, const qkv_tensor* lse,
                                                qkv_stream stream);
QKV_EXPORT qkv_status qkv_mla_merge_context(const qkv_mla_prefill* prefill, const qkv_state* context,
                                            const qkv_state* new_tokens, const qkv_mla_plan* plan,
                                            const qkv_tensor* out, const qkv_tensor* out_scale, qkv_stream stream);
// gather_stream: the address of the stream on which chunks are gathered, each while the one before it computes; NULL:
// on `stream`. ranks: with a plan for several ranks, which share the cache; NULL with one.
QKV_EXPORT qkv_status qkv_mla_forward(const qkv_mla_prefill* prefill, const qkv_tensor* query,
                                      const qkv_tensor* new_latents, const qkv_tensor* latent_cache,
                                      const qkv_mla_plan* plan, const qkv_projection* projection,
                                      const qkv_tensor* workspace, qkv_collectives* ranks, const qkv_tensor* out,
                                      const qkv_tensor* lse, const qkv_tensor* out_scale,
                                      const qkv_tensor* latent_scale, const qkv_stream* gather_stream,
                                      qkv_stream stream);

// --- kernels compiled at run time: as in warmup.hpp, compile.hpp and kernel_cache.hpp -------------------------------

typedef int32_t qkv_planner_use;
enum { QKV_PLANNERS_NONE = 0, QKV_PLANNERS_HOST = 1, QKV_PLANNERS_DEVICE = 2 };

// A kernel that the run can reach. Strings are never NULL; an empty error: the kernel is there.
typedef struct qkv_warmed_kernel {
  const char* name;
  double seconds;
  int32_t compiled;  // 0: it was found on disk or in the process
  const char* error;
} qkv_warmed_kernel;

// After each kernel, on a thread of the library's, one call at a time. A result other than 0 ends the warm-up, and the
// call fails.
typedef int32_t (*qkv_warmup_progress)(void* context, int32_t done, int32_t total, const qkv_warmed_kernel* kernel);

typedef struct qkv_warmup_options {
  size_t struct_size;
  const char* arch;       // "sm_90a": no GPU is needed then. NULL or empty: the device's
  int32_t device_index;   // of the GPU
  int32_t max_query_len;  // 0 = no bound
  int32_t max_model_len;  // 0 = no bound
  int32_t num_threads;    // 0 = as many as the process may use
  qkv_warmup_progress on_progress;
  void* progress_context;
  qkv_planner_use planners;
  int32_t merge_states;  // calls that belong to no layer, as far as the run makes them
  int32_t gather_cache;
  int32_t cache_write;
} qkv_warmup_options;

QKV_EXPORT void qkv_warmup_options_init(qkv_warmup_options* options, size_t struct_size);

// Compiles all kernels that batches of these layers can reach. Specs are given by address: layers [num_layers] and
// mla_layers [num_mla_layers], whose gathers and merges are warmed with them. A kernel that does not compile fails
// nothing: the result tells. On failure *result is NULL.
typedef struct qkv_warmup_result qkv_warmup_result;
QKV_EXPORT qkv_status qkv_warmup(const qkv_layer_spec* const* layers, int64_t num_layers,
                                 const qkv_mla_spec* const* mla_layers, int64_t num_mla_layers,
                                 const qkv_warmup_options* options, qkv_warmup_result** result);
QKV_EXPORT void qkv_warmup_result_destroy(qkv_warmup_result* result);  // NULL is fine; it owns the strings it gave
QKV_EXPORT qkv_status qkv_warmup_result_num_kernels(const qkv_warmup_result* result, int64_t* num_kernels);
QKV_EXPORT qkv_status qkv_warmup_result_kernel(const qkv_warmup_result* result, int64_t index,
                                               qkv_warmed_kernel* kernel);
// Layers that cannot run there: which, and the first reason. mla_layers are two each (three with
// outputs of 8 bits), behind the others.
QKV_EXPORT qkv_status qkv_warmup_result_num_skipped(const qkv_warmup_result* result, int64_t* num_skipped);
QKV_EXPORT qkv_status qkv_warmup_result_skipped(const qkv_warmup_result* result, int64_t index, const char** text);
QKV_EXPORT qkv_status qkv_warmup_result_seconds(const qkv_warmup_result* result, double* seconds);

typedef int32_t qkv_compile_event_kind;
enum { QKV_COMPILE_STARTED = 0, QKV_COMPILE_FINISHED = 1, QKV_COMPILE_FAILED = 2, QKV_COMPILE_FROM_CACHE = 3 };

typedef struct qkv_compile_event {
  qkv_compile_event_kind kind;
  const char* kernel;
  const char* arch;
  int64_t index;   // compiles of this process so far, this one included
  double seconds;  // of CPU; when finished
  int32_t registers;
  int32_t spill_bytes;
} qkv_compile_event;

// News of each compile, on the thread that compiles, one call at a time, in place of the lines on stderr; NULL brings
// them back. `context` must stay valid until another callback is set and no call compiles.
typedef void (*qkv_compile_callback)(void* context, const qkv_compile_event* event);
QKV_EXPORT qkv_status qkv_set_compile_callback(qkv_compile_callback callback, void* context);
// How often this process has started the compiler.
QKV_EXPORT qkv_status qkv_num_compiles(int64_t* num_compiles);

// The folder in use; empty where kernels are not kept on disk. max_bytes may be NULL.
QKV_EXPORT qkv_status qkv_kernel_cache_place(char* folder, size_t capacity, size_t* needed, int64_t* max_bytes);

// An entry of the folder. Strings are never NULL; where `fault` is not empty, it says why the entry will not be used,
// and what follows is empty.
typedef struct qkv_cached_kernel {
  const char* path;
  int64_t num_bytes;
  int64_t last_used;  // seconds since 1970
  const char* fault;
  const char* name;
  const char* compiler;
  const char* arch;
  double compile_seconds;
  int32_t registers;
  int32_t spill_bytes;
} qkv_cached_kernel;

// Every entry, read in full and checked, the least recently used first. On failure *kernels is NULL.
typedef struct qkv_cached_kernels qkv_cached_kernels;
QKV_EXPORT qkv_status qkv_cached_kernels_list(qkv_cached_kernels** kernels);
QKV_EXPORT void qkv_cached_kernels_destroy(qkv_cached_kernels* kernels);  // NULL is fine; it owns the strings it gave
QKV_EXPORT qkv_status qkv_cached_kernels_count(const qkv_cached_kernels* kernels, int64_t* count);
QKV_EXPORT qkv_status qkv_cached_kernels_get(const qkv_cached_kernels* kernels, int64_t index,
                                             qkv_cached_kernel* kernel);
// Each says how many kernels it deleted, wrote or added. arch NULL or empty: all architectures.
QKV_EXPORT qkv_status qkv_clear_kernel_cache(int64_t* num_kernels);
QKV_EXPORT qkv_status qkv_export_kernels(const char* path, const char* arch, int64_t* num_kernels);
QKV_EXPORT qkv_status qkv_import_kernels(const char* path, int64_t* num_kernels);

// --- ranks of context parallelism: as in collectives.hpp ------------------------------------------------------------

// qkv_collectives: one rank's end of what ranks exchange. Destroying it leaves the ranks. On failure *ranks is NULL.

// num_ranks objects, one a thread of this process. timeout_ms: how long a call may wait for the others; 0 = a minute.
QKV_EXPORT qkv_status qkv_in_process_ranks(int32_t num_ranks, qkv_device device, int64_t timeout_ms,
                                           qkv_collectives** ranks);
// fortran_communicator: MPI_Comm_c2f of the caller's communicator, or NULL: MPI_COMM_WORLD.
QKV_EXPORT qkv_status qkv_mpi_ranks(const int32_t* fortran_communicator, int64_t timeout_ms, qkv_collectives** ranks);
enum { QKV_NCCL_UNIQUE_ID_BYTES = 128 };
QKV_EXPORT qkv_status qkv_nccl_unique_id(uint8_t* id);  // [QKV_NCCL_UNIQUE_ID_BYTES]
QKV_EXPORT qkv_status qkv_nccl_ranks(const uint8_t* id, int32_t num_ranks, int32_t rank, int32_t device_index,
                                     qkv_collectives** ranks);
// On an ncclComm_t of the caller's, who goes on owning it.
QKV_EXPORT qkv_status qkv_nccl_ranks_of(void* communicator, int32_t device_index, qkv_collectives** ranks);

// The caller's own. A row is what one rank sends to another; none is empty, and send and receive lie apart. A result
// other than 0 fails the call. On a GPU the work is put on the stream; on the CPU it is done on return.
typedef struct qkv_collectives_functions {
  size_t struct_size;
  // receive [num_ranks] rows: row i = rank i's send.
  int32_t (*all_gather)(void* context, const void* send, void* receive, int64_t row_bytes, qkv_stream stream);
  // send [num_ranks] rows of floats: receive = sum over the ranks of their send's row of this rank.
  int32_t (*reduce_scatter)(void* context, const float* send, float* receive, int64_t row_elements, qkv_stream stream);
  // send, receive [num_ranks] rows: row i = rank i's send's row of this rank.
  int32_t (*all_to_all)(void* context, const void* send, void* receive, int64_t row_bytes, qkv_stream stream);
} qkv_collectives_functions;

QKV_EXPORT void qkv_collectives_functions_init(qkv_collectives_functions* functions, size_t struct_size);
QKV_EXPORT qkv_status qkv_collectives_create(const qkv_collectives_functions* functions, void* context, int32_t rank,
                                             int32_t num_ranks, qkv_device device, qkv_collectives** ranks);
QKV_EXPORT void qkv_collectives_destroy(qkv_collectives* ranks);  // NULL is fine

QKV_EXPORT qkv_status qkv_collectives_rank(const qkv_collectives* ranks, int32_t* rank);
QKV_EXPORT qkv_status qkv_collectives_num_ranks(const qkv_collectives* ranks, int32_t* num_ranks);
QKV_EXPORT qkv_status qkv_all_gather(qkv_collectives* ranks, const qkv_tensor* send, const qkv_tensor* receive,
                                     qkv_stream stream);
QKV_EXPORT qkv_status qkv_reduce_scatter(qkv_collectives* ranks, const qkv_tensor* send, const qkv_tensor* receive,
                                         qkv_stream stream);
QKV_EXPORT qkv_status qkv_all_to_all(qkv_collectives* ranks, const qkv_tensor* send, const qkv_tensor* receive,
                                     qkv_stream stream);
// What has gone wrong since: work on a stream may fail after the call that put it there.
QKV_EXPORT qkv_status qkv_collectives_check(qkv_collectives* ranks);

// --- context parallelism: as in context_parallel.hpp ----------------------------------------------------------------

// How states over the ranks' parts of a context become the states of a rank's heads.
typedef int32_t qkv_state_exchange;
enum { QKV_EXCHANGE_ALL_TO_ALL = 0, QKV_EXCHANGE_REDUCE_SCATTER = 1, QKV_EXCHANGE_ALL_GATHER = 2 };

typedef struct qkv_context_parallel qkv_context_parallel;
typedef struct qkv_parallel_plan qkv_parallel_plan;
typedef struct qkv_parallel_planner qkv_parallel_planner;

// A layer as on one rank, with the heads of all ranks, on the device of `ranks`, which may be destroyed before it.
// Collective. interleave_size: tokens in a row that one rank keeps. On failure *attention is NULL.
QKV_EXPORT qkv_status qkv_context_parallel_create(const qkv_layer_spec* layer, int32_t interleave_size,
                                                  qkv_state_exchange exchange, const qkv_collectives* ranks,
                                                  qkv_context_parallel** attention);
QKV_EXPORT void qkv_context_parallel_destroy(qkv_context_parallel* attention);  // NULL is fine
// For qkv_shard_slots.
QKV_EXPORT qkv_status qkv_context_parallel_shard(const qkv_context_parallel* attention, qkv_shard* shard);
// Of this rank: those of its query, out and lse.
QKV_EXPORT qkv_status qkv_context_parallel_num_heads(const qkv_context_parallel* attention, int32_t* num_heads);
// Of forward, for plans of at most so many new tokens.
QKV_EXPORT qkv_status qkv_context_parallel_workspace_bytes(const qkv_context_parallel* attention, int64_t max_tokens,
                                                           int64_t* workspace_bytes);

// The batch is the same on every rank but for block_table, the rank's own pages, and slot_mapping. On failure *plan is
// NULL. Plans as those of qkv_attention_plan.
QKV_EXPORT qkv_status qkv_context_parallel_plan(const qkv_context_parallel* attention, const qkv_batch* batch,
                                                qkv_parallel_plan** plan, qkv_stream stream);
QKV_EXPORT void qkv_parallel_plan_destroy(qkv_parallel_plan* plan);  // NULL is fine
// 0 where no request has a context: then forward exchanges nothing. The same on every rank.
QKV_EXPORT qkv_status qkv_parallel_plan_exchanges(const qkv_parallel_plan* plan, int32_t* exchanges);
QKV_EXPORT qkv_status qkv_parallel_plan_workspace_bytes(const qkv_parallel_plan* plan, int64_t* workspace_bytes);

// Plans in memory made once, as qkv_attention_planner. They always exchange.
QKV_EXPORT qkv_status qkv_context_parallel_planner(const qkv_context_parallel* attention, const qkv_plan_limits* limits,
                                                   qkv_parallel_planner** planner);
QKV_EXPORT void qkv_parallel_planner_destroy(qkv_parallel_planner* planner);  // NULL is fine; its plans live on
QKV_EXPORT qkv_status qkv_parallel_planner_plan(qkv_parallel_planner* planner, const qkv_batch* batch,
                                                qkv_parallel_plan** plan, qkv_stream stream);
QKV_EXPORT qkv_status qkv_parallel_planner_check(const qkv_parallel_planner* planner, qkv_stream stream);

// As qkv_attention_update_cache: the new tokens that this rank keeps.
QKV_EXPORT qkv_status qkv_context_parallel_update_cache(const qkv_context_parallel* attention, const qkv_tensor* key,
                                                        const qkv_tensor* value, const qkv_kv_cache* cache,
                                                        const qkv_parallel_plan* plan, qkv_stream stream);
// Collective. query [>= num_tokens, num_heads, head_dim] and out, of the rank's heads; key, value: of the new tokens,
// all KV heads; lse and out_scale may be NULL. new_tokens_stream: where the new tokens are attended to, beside the
// exchanges; NULL: on `stream`.
QKV_EXPORT qkv_status qkv_context_parallel_forward(const qkv_context_parallel* attention, const qkv_tensor* query,
                                                   const qkv_tensor* key, const qkv_tensor* value,
                                                   const qkv_kv_cache* cache, const qkv_parallel_plan* plan,
                                                   const qkv_tensor* workspace, const qkv_tensor* out,
                                                   const qkv_tensor* lse, const qkv_tensor* out_scale,
                                                   const qkv_stream* new_tokens_stream, qkv_stream stream);

// --- MLA prefill over ranks that exchange states: as in mla_context_parallel.hpp ------------------------------------

typedef struct qkv_mla_context_parallel qkv_mla_context_parallel;

// As qkv_context_parallel_create. Where ranks exchange latents instead, qkv_mla_forward takes them.
QKV_EXPORT qkv_status qkv_mla_context_parallel_create(const qkv_mla_spec* layer, int32_t interleave_size,
                                                      qkv_state_exchange exchange, const qkv_collectives* ranks,
                                                      qkv_mla_context_parallel** attention);
QKV_EXPORT void qkv_mla_context_parallel_destroy(qkv_mla_context_parallel* attention);  // NULL is fine
QKV_EXPORT qkv_status qkv_mla_context_parallel_shard(const qkv_mla_context_parallel* attention, qkv_shard* shard);
// Of this rank: those of its query, out and lse.
QKV_EXPORT qkv_status qkv_mla_context_parallel_num_heads(const qkv_mla_context_parallel* attention, int32_t* num_heads);
// Of forward, for plans of at most so many new tokens and chunks of at most so many context tokens, of all ranks.
QKV_EXPORT qkv_status qkv_mla_context_parallel_workspace_bytes(const qkv_mla_context_parallel* attention,
                                                               int64_t max_new_tokens, int64_t workspace_tokens,
                                                               int64_t* bytes);
// A plan as qkv_mla_prefill_plan's, of the rank's own block table; ranks and interleave are the layer's, and 0 in the
// options. On failure *plan is NULL.
QKV_EXPORT qkv_status qkv_mla_context_parallel_plan(const qkv_mla_context_parallel* attention, const qkv_batch* batch,
                                                    const qkv_context_chunk_options* options, qkv_mla_plan** plan,
                                                    qkv_stream stream);
// Collective, but for batches without context. query, out, lse and out_scale: of the rank's heads; projection: to the
// keys and values of all ranks' heads. The others, and what may be NULL, as in qkv_mla_forward.
QKV_EXPORT qkv_status qkv_mla_context_parallel_forward(const qkv_mla_context_parallel* attention,
                                                       const qkv_tensor* query, const qkv_tensor* new_latents,
                                                       const qkv_tensor* latent_cache, const qkv_mla_plan* plan,
                                                       const qkv_projection* projection, const qkv_tensor* workspace,
                                                       const qkv_tensor* out, const qkv_tensor* lse,
                                                       const qkv_tensor* out_scale, const qkv_tensor* latent_scale,
                                                       const qkv_stream* gather_stream, qkv_stream stream);

// --- the library ----------------------------------------------------------------------------------------------------

QKV_EXPORT const char* qkv_version(void);
// Version, instruction sets, threads and environment, a line each.
QKV_EXPORT qkv_status qkv_info(char* text, size_t capacity, size_t* needed);

// 0 = QKV_THREADS, else all that the process may use.
QKV_EXPORT qkv_status qkv_set_num_threads(int32_t num_threads);
QKV_EXPORT qkv_status qkv_num_threads(int32_t* num_threads);

// The host's own thread pool: `run` must call body(body_context, i) once for each i in [0, n), in any order, on any
// threads, and return when all are done. body never fails and never throws. A NULL `run` restores OpenMP. `context`
// must stay valid until another pool is set and no call runs.
typedef void (*qkv_body)(void* body_context, int64_t i);
typedef void (*qkv_parallel_for)(void* context, int64_t n, qkv_body body, void* body_context);
QKV_EXPORT qkv_status qkv_set_parallel_for(qkv_parallel_for run, void* context);

#ifdef __cplusplus
}
#endif
