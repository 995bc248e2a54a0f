// What a layer is: everything that kernels are chosen and compiled for. Nothing here changes from step to step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "qkv/export.hpp"
#include "qkv/mask.hpp"
#include "qkv/shard.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

enum class AttentionType : uint8_t {
  decoder,          // the new tokens are the last keys of their request; default mask causal
  encoder_only,     // keys are the packed new tokens themselves, no cache; default mask everything
  encoder,          // the same, for the encoder of an encoder-decoder model
  encoder_decoder,  // cross attention: keys of another sequence; default mask everything
};

QKV_EXPORT std::string_view to_string(AttentionType type);

// What has a scale of its own in 8-bit keys and values, key and value apart: x is stored as x / scale and read as
// stored · scale. The scales are tensors in KvCache, or beside dense keys and values, of the shapes below.
enum class KvScales : uint8_t {
  none,              // keys and values of 16- and 32-bit floats
  per_tensor,        // [1]
  per_head,          // [num_kv_heads]
  per_request_head,  // [num_requests, num_kv_heads]
  // [num_pages, page_size, num_kv_heads], beside the pages: update_cache chooses and writes them; dense:
  // [num_keys, num_kv_heads, 1]
  per_token_head,
};

QKV_EXPORT std::string_view to_string(KvScales scales);

// What has a scale of its own in an output of 8-bit floats, which is the result / scale. The scales are forward's
// out_scale, of the shapes below.
enum class OutputScales : uint8_t {
  per_tensor,       // [1], given
  per_token_group,  // [>= num_tokens, num_q_heads, ceil(head_dim_v / 128)], chosen and written: 128 columns of a head
};

QKV_EXPORT std::string_view to_string(OutputScales scales);

// A paged cache. Where a page, token and head lie is said by the strides of the tensors in KvCache, so one layer
// serves every layout.
struct CacheSpec {
  int32_t page_size = 16;  // tokens a page, any number >= 1
};

struct LayerSpec {
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_q_heads; query head h reads KV head h / (num_q_heads / num_kv_heads)
  int32_t head_dim = 0;      // of query and key, 8 … 512
  int32_t head_dim_v = 0;    // of value and output, 8 … 512; 0 = head_dim

  DType query_dtype = DType::f32;  // of 8-bit floats: forward takes a query_scale
  DType kv_dtype = DType::f32;     // of the cache, or of dense keys and values; may be 8-bit
  KvScales kv_scales = KvScales::none;
  std::optional<DType> output_dtype =
      {};  // not given: query_dtype, or bf16 if that is 8-bit. 8-bit floats: forward takes an out_scale
  OutputScales output_scales = OutputScales::per_tensor;  // of outputs of 8-bit floats

  AttentionType type = AttentionType::decoder;
  std::optional<CacheSpec> cache = {};  // not given: keys and values are dense tensors

  // The whole mask, windows included (mask.hpp). Not given: the type's default.
  std::optional<Mask> mask = {};

  // score = softcap(scale · q·k) - slope·|q_pos - kv_pos|, then the mask, then the softmax with the sink.
  std::optional<float> scale = {};       // not given: 1 / sqrt(head_dim)
  float softcap = 0;                     // c > 0: c·tanh(s / c); 0 = off
  std::vector<float> alibi_slopes = {};  // [num_q_heads]; empty = none
  bool alibi_per_request = false;        // slopes come with the batch: f32 [num_requests, num_q_heads]
  std::vector<float> sinks = {};         // [num_q_heads] logits that join the denominator once; empty = none

  // Of layers whose states are merged, one has the sinks.
  KeyRun key_run = KeyRun::all;
  Shard shard = {};

  int32_t group_size() const { return num_q_heads / num_kv_heads; }
  int32_t value_dim() const { return head_dim_v != 0 ? head_dim_v : head_dim; }
  QKV_EXPORT DType out_dtype() const;
  QKV_EXPORT float effective_scale() const;
  QKV_EXPORT Mask effective_mask() const;
};

// Why a layer cannot run: one sentence a reason, each naming the field, its value and what is allowed.
// Empty = Attention(spec, device) succeeds. Answers in microseconds and touches no device.
QKV_EXPORT std::vector<std::string> explain(const LayerSpec& spec, Device device = {});

// The feature x feature table of one device kind as text, printed from the rules that explain() runs.
QKV_EXPORT std::string support_matrix(DeviceKind device = DeviceKind::cpu);

}  // namespace qkv
