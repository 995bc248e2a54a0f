// What the CPU's forward kernels are given: one work item, all pointers resolved. The engine fills it in; a kernel
// reads the keys in place and leaves either finished output rows or a partial state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/output_scale.hpp"
#include "cpu/row_kernels.hpp"
#include "mask/program.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cpu {

// Keys per tile of the absolute grid on which masks are classified and splits begin.
inline constexpr int32_t kTileKv = 128;
// Largest head_dim and head_dim_v.
inline constexpr int32_t kMaxHeadDim = 512;
// Packed rows of a query tile; tiles of one item share the packing of keys and values.
inline constexpr int32_t kTileQ = 96;
// Packed rows of an item for many_rows.
inline constexpr int32_t kRowsPerItem = 384;
// Packed rows of a request up to which few_rows runs.
inline constexpr int32_t kFewRows = 16;
// Packed rows of an item for few_rows whose keys several requests share.
inline constexpr int32_t kSharedFewRows = 256;
// Rows of such an item from which on many_rows is the quicker one.
inline constexpr int32_t kManyRowsFrom = 32;

// What the elements of 8-bit rows are multiplied by: of one request and one KV head, strides in elements, 0 where
// tokens share a scale.
struct TokenScales {
  const float* data = nullptr;
  int64_t page_stride = 0;
  int64_t token_stride = 0;
};

// The keys and values of one KV head, of a request or of several that share them. Strides in bytes.
struct KeyValueSource {
  DType dtype = DType::f32;        // f32, f16, bf16, f8e4m3, f8e5m2, i8
  const std::byte* key = nullptr;  // dense: the request's first key; paged: page 0 of the cache; at this KV head
  const std::byte* value = nullptr;
  const int32_t* pages = nullptr;  // page number by shown key / page_size; nullptr = dense
  int32_t page_size = 0;
  int64_t key_token_stride = 0;
  int64_t value_token_stride = 0;
  int64_t key_page_stride = 0;
  int64_t value_page_stride = 0;
  TokenScales key_scale, value_scale;  // of 8-bit elements

  // What the elements of the key (or value) at a position are multiplied by.
  float scale_of(const TokenScales& scales, int32_t position) const {
    if (pages == nullptr) return scales.data[position * scales.token_stride];
    return scales.data[pages[position / page_size] * scales.page_stride + position % page_size * scales.token_stride];
  }
};

// A new token of an item: its heads of the group are rows. Tokens of one item may belong to several requests.
struct TaskToken {
  const std::byte* query = nullptr;  // [group_size, head_dim]
  float query_scale = 1;             // what their elements are multiplied by
  const mask::ProgramInput* mask_input = nullptr;
  int32_t query_index = 0;              // among its request's new tokens
  const float* alibi_slopes = nullptr;  // [group_size], or nullptr for all tokens

  // Partial result: state_out [group_size, head_dim_v] (mean, normalised) and state_lse [group_size] (natural).
  // nullptr: the rows are finished.
  float* state_out = nullptr;
  float* state_lse = nullptr;
  std::byte* out = nullptr;  // [group_size, head_dim_v]
  OutputScale out_scale;     // from the group's first head on
  float* lse = nullptr;      // [group_size], or nullptr

  // Absolute position.
  int32_t q_pos() const { return mask_input->q_pos(query_index); }
};

// Rows are packed (token, head of the group): row = token·group_size + head.
struct ForwardTask {
  int32_t head_dim = 0;
  int32_t head_dim_v = 0;
  int32_t group_size = 0;
  std::span<const TaskToken> tokens;

  DType query_dtype = DType::f32;  // as the dtypes of keys, but i8
  int64_t query_head_stride = 0;   // in bytes

  KeyValueSource kv;
  // Non-empty runs of keys in rising order; runs begin at multiples of kTileKv. Keys outside are not read. A run is
  // full if every token sees all of it.
  std::span<const mask::KeySegment> segments;

  float scale = 1;
  float softcap = 0;             // 0 = off
  const float* sinks = nullptr;  // [group_size], or nullptr: joined once, by whoever finishes the row

  const mask::Program* mask = nullptr;  // evaluated on partial segments
  int32_t first_head = 0;               // the group's first query head

  DType out_dtype = DType::f32;
  int64_t out_head_stride = 0;  // in bytes
  int64_t lse_head_stride = 0;  // in elements

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_rows() const { return num_tokens() * group_size; }
  bool has_alibi() const { return !tokens.empty() && tokens.front().alibi_slopes != nullptr; }
};

// out = rows · matrixᵀ, sums in f32. Strides in bytes; rows of all three are contiguous and of one dtype.
struct ProjectTask {
  DType dtype = DType::f32;  // f32, f16, bf16
  int32_t num_rows = 0;
  int32_t depth = 0;
  int32_t num_columns = 0;
  const std::byte* rows = nullptr;  // [num_rows, depth]
  int64_t row_stride = 0;
  const std::byte* matrix = nullptr;  // [num_columns, depth]
  int64_t column_stride = 0;
  std::byte* out = nullptr;  // [num_rows, num_columns]
  int64_t out_stride = 0;
};

using ProjectKernel = void (*)(const ProjectTask& task);
using ForwardKernel = void (*)(const ForwardTask& task);

// The kernels of one instruction set. Bits of a row depend on the row's own numbers and on which of the two kernels
// runs, never on the other rows of the task.
struct ForwardKernels {
  std::string_view name;    // "avx2", "avx512", …
  ForwardKernel many_rows;  // tiles of packed rows: prefill
  ForwardKernel few_rows;   // a row group at a time straight from the cache: decode
  ProjectKernel project_rows;
  const RowKernels* rows;  // the same bits in all
};

// The plain definition on a task: what both kernels must equal within rounding.
void forward_plain(const ForwardTask& task);
void project_plain(const ProjectTask& task);

// Those compiled in that this CPU has, best first; the last is the plain definition.
std::span<const ForwardKernels> all_forward_kernels();
// One of them by name; throws Error with the names if there is none.
const ForwardKernels& find_forward_kernels(std::string_view name);
// The best instruction set of this CPU, or the one that QKV_FORCE names (an unknown name throws).
const ForwardKernels& forward_kernels();
// Names compiled in that this CPU has, best first.
std::span<const std::string_view> instruction_set_names();

}  // namespace qkv::cpu
