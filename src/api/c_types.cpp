#include "api/c_types.hpp"

#include <algorithm>
#include <cstddef>

#include "qkv/compile.hpp"
#include "qkv/warmup.hpp"

namespace qkv::api {
namespace {

template <class Enum>
constexpr bool same(int32_t number, Enum value) {
  return number == static_cast<int32_t>(value);
}

static_assert(same(QKV_F32, DType::f32) && same(QKV_F16, DType::f16) && same(QKV_BF16, DType::bf16));
static_assert(same(QKV_F8E4M3, DType::f8e4m3) && same(QKV_I32, DType::i32) && same(QKV_I64, DType::i64));
static_assert(same(QKV_F8E5M2, DType::f8e5m2) && same(QKV_I8, DType::i8));
static_assert(same(QKV_SCALES_NONE, KvScales::none) && same(QKV_SCALES_PER_TENSOR, KvScales::per_tensor));
static_assert(same(QKV_SCALES_PER_HEAD, KvScales::per_head));
static_assert(same(QKV_SCALES_PER_REQUEST_HEAD, KvScales::per_request_head));
static_assert(same(QKV_SCALES_PER_TOKEN_HEAD, KvScales::per_token_head));
static_assert(same(QKV_OUTPUT_SCALES_PER_TENSOR, OutputScales::per_tensor));
static_assert(same(QKV_OUTPUT_SCALES_PER_TOKEN_GROUP, OutputScales::per_token_group));
static_assert(same(QKV_SCALES_GIVEN, ScaleSource::given) && same(QKV_SCALES_CHOSEN, ScaleSource::chosen));
static_assert(same(QKV_CPU, DeviceKind::cpu) && same(QKV_CUDA, DeviceKind::cuda));
static_assert(same(QKV_DECODER, AttentionType::decoder) && same(QKV_ENCODER_ONLY, AttentionType::encoder_only));
static_assert(same(QKV_ENCODER, AttentionType::encoder) && same(QKV_ENCODER_DECODER, AttentionType::encoder_decoder));
static_assert(same(QKV_SHARING_AUTOMATIC, PrefixSharing::automatic) && same(QKV_SHARING_OFF, PrefixSharing::off));
static_assert(same(QKV_SHARING_ALWAYS, PrefixSharing::always));
static_assert(same(QKV_KEYS_ALL, KeyRun::all) && same(QKV_KEYS_CONTEXT, KeyRun::context));
static_assert(same(QKV_KEYS_NEW_TOKENS, KeyRun::new_tokens));
static_assert(same(QKV_PLANNERS_NONE, PlannerUse::none) && same(QKV_PLANNERS_HOST, PlannerUse::host));
static_assert(same(QKV_PLANNERS_DEVICE, PlannerUse::device));
static_assert(same(QKV_COMPILE_STARTED, CompileEvent::Kind::started));
static_assert(same(QKV_COMPILE_FINISHED, CompileEvent::Kind::finished));
static_assert(same(QKV_COMPILE_FAILED, CompileEvent::Kind::failed));
static_assert(same(QKV_COMPILE_FROM_CACHE, CompileEvent::Kind::from_cache));
static_assert(QKV_MAX_RANK == Tensor::kMaxRank);

DType dtype_from_c(qkv_dtype dtype, const std::string& name) { return enum_from_c(dtype, DType::i8, name); }

std::vector<MaskOperand> operands_from_c(const qkv_mask_operand* operands, int64_t count) {
  std::vector<MaskOperand> result;
  for (const qkv_mask_operand& operand : copy_array(operands, count, "mask_operands")) {
    const std::string name = fmt::format("mask_operands[{}]", result.size());
    const std::string text = &required(operand.name, (name + ".name").c_str());
    result.push_back({text, from_c(operand.values, fmt::format("mask_operands[{}]", text))});
  }
  return result;
}

}  // namespace

qkv_status to_c(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_argument:
      return QKV_INVALID_ARGUMENT;
    case ErrorCode::mismatch:
      return QKV_MISMATCH;
    case ErrorCode::unsupported:
      return QKV_UNSUPPORTED;
    case ErrorCode::unavailable:
      return QKV_UNAVAILABLE;
    case ErrorCode::internal:
      return QKV_INTERNAL;
  }
  return QKV_INTERNAL;
}

DeviceKind device_kind_from_c(qkv_device_kind kind, const std::string& name) {
  if (kind != QKV_CPU && kind != QKV_CUDA) refuse(name, kind, "0 (cpu) or 1 (cuda)");
  return static_cast<DeviceKind>(kind);
}

Device from_c(qkv_device device, const std::string& name) {
  return {device_kind_from_c(device.kind, name + ".kind"), device.index};
}

Tensor from_c(const qkv_tensor& tensor, const std::string& name) {
  if (tensor.rank < 0 || tensor.rank > QKV_MAX_RANK) {
    refuse(name + ".rank", tensor.rank, fmt::format("1 to {}, or 0 for a tensor that is not given", +QKV_MAX_RANK));
  }
  Tensor result;
  result.data = tensor.data;
  result.dtype = dtype_from_c(tensor.dtype, name + ".dtype");
  result.device = from_c(tensor.device, name + ".device");
  result.rank = tensor.rank;
  std::copy_n(tensor.shape, QKV_MAX_RANK, result.shape.begin());
  std::copy_n(tensor.stride, QKV_MAX_RANK, result.stride.begin());
  return result;
}

Tensor from_c(const qkv_tensor* tensor, const std::string& name) {
  return tensor == nullptr ? Tensor() : from_c(*tensor, name);
}

qkv_tensor to_c(const Tensor& tensor) {
  qkv_tensor result{};
  result.data = tensor.data;
  result.dtype = static_cast<qkv_dtype>(tensor.dtype);
  result.device = {static_cast<qkv_device_kind>(tensor.device.kind), tensor.device.index};
  result.rank = tensor.rank;
  std::copy(tensor.shape.begin(), tensor.shape.end(), result.shape);
  std::copy(tensor.stride.begin(), tensor.stride.end(), result.stride);
  return result;
}

KvCache from_c(const qkv_kv_cache* cache) {
  const qkv_kv_cache& given = required(cache, "cache");
  return {from_c(given.key, "cache.key"), from_c(given.value, "cache.value"),
          from_c(given.key_scale, "cache.key_scale"), from_c(given.value_scale, "cache.value_scale")};
}

Mask mask_from_c(const char* text) { return parse_mask(&required(text, "mask")); }

Shard from_c(const qkv_shard& shard) {
  return {shard.rank, shard.num_ranks == 0 ? 1 : shard.num_ranks,
          shard.interleave_size == 0 ? 1 : shard.interleave_size};
}

qkv_shard to_c(const Shard& shard) { return {shard.rank, shard.num_ranks, shard.interleave_size}; }

LayerSpec from_c(const qkv_layer_spec* spec) {
  const auto given = read_sized(spec, offsetof(qkv_layer_spec, has_output_dtype), "spec");
  LayerSpec layer;
  layer.num_q_heads = given.num_q_heads;
  layer.num_kv_heads = given.num_kv_heads;
  layer.head_dim = given.head_dim;
  layer.head_dim_v = given.head_dim_v;
  layer.query_dtype = dtype_from_c(given.query_dtype, "query_dtype");
  layer.kv_dtype = dtype_from_c(given.kv_dtype, "kv_dtype");
  layer.kv_scales = enum_from_c(given.kv_scales, KvScales::per_token_head, "kv_scales");
  if (is_set(given.has_output_dtype)) layer.output_dtype = dtype_from_c(given.output_dtype, "output_dtype");
  layer.type = enum_from_c(given.type, AttentionType::encoder_decoder, "type");
  if (is_set(given.has_cache)) layer.cache = CacheSpec{given.page_size};
  if (given.mask != nullptr) layer.mask = mask_from_c(given.mask);
  if (is_set(given.has_scale)) layer.scale = given.scale;
  layer.softcap = given.softcap;
  layer.alibi_per_request = is_set(given.alibi_per_request);
  layer.alibi_slopes = copy_array(given.alibi_slopes, given.num_alibi_slopes, "alibi_slopes");
  layer.sinks = copy_array(given.sinks, given.num_sinks, "sinks");
  layer.key_run = enum_from_c(given.key_run, KeyRun::new_tokens, "key_run");
  layer.shard = from_c(given.shard);
  layer.output_scales = enum_from_c(given.output_scales, OutputScales::per_token_group, "output_scales");
  if (given.reserved != 0) refuse("reserved", given.reserved, "0");
  return layer;
}

MlaSpec from_c(const qkv_mla_spec* spec) {
  const auto given = read_sized(spec, offsetof(qkv_mla_spec, has_output_dtype), "spec");
  MlaSpec layer;
  layer.num_heads = given.num_heads;
  layer.qk_nope_head_dim = given.qk_nope_head_dim;
  layer.qk_rope_head_dim = given.qk_rope_head_dim;
  layer.v_head_dim = given.v_head_dim;
  layer.kv_lora_rank = given.kv_lora_rank;
  layer.dtype = dtype_from_c(given.dtype, "dtype");
  layer.cache = {given.page_size};
  if (is_set(given.has_cache_dtype)) layer.cache_dtype = dtype_from_c(given.cache_dtype, "cache_dtype");
  layer.output_scales = enum_from_c(given.output_scales, OutputScales::per_token_group, "output_scales");
  if (is_set(given.has_output_dtype)) layer.output_dtype = dtype_from_c(given.output_dtype, "output_dtype");
  if (given.mask != nullptr) layer.mask = mask_from_c(given.mask);
  if (is_set(given.has_scale)) layer.scale = given.scale;
  layer.softcap = given.softcap;
  layer.sinks = copy_array(given.sinks, given.num_sinks, "sinks");
  if (given.reserved != 0) refuse("reserved", given.reserved, "0");
  return layer;
}

ContextChunkOptions from_c(const qkv_context_chunk_options* options) {
  const auto given = read_sized(options, offsetof(qkv_context_chunk_options, num_ranks), "options");
  ContextChunkOptions result;
  result.workspace_tokens = given.workspace_tokens;
  result.page_size = given.page_size;
  if (given.num_ranks != 0) result.num_ranks = given.num_ranks;
  if (given.interleave_size != 0) result.interleave_size = given.interleave_size;
  result.batch_invariant = is_set(given.batch_invariant);
  result.rank = given.rank;
  return result;
}

static std::vector<PrefixGroup> groups_from_c(const qkv_prefix_group* groups, int64_t num_groups) {
  std::vector<PrefixGroup> result;
  for (const qkv_prefix_group& group : copy_array(groups, num_groups, "prefix_groups")) {
    const std::string name = fmt::format("prefix_groups[{}].requests", result.size());
    result.push_back({copy_array(group.requests, group.num_requests, name), group.num_tokens});
  }
  return result;
}

Batch from_c(const qkv_batch* batch) {
  const auto given = read_sized(batch, offsetof(qkv_batch, block_table), "batch");
  Batch result;
  result.query_start_loc = from_c(given.query_start_loc, "query_start_loc");
  result.seq_lens = from_c(given.seq_lens, "seq_lens");
  result.block_table = from_c(given.block_table, "block_table");
  result.slot_mapping = from_c(given.slot_mapping, "slot_mapping");
  result.mask_operands = operands_from_c(given.mask_operands, given.num_mask_operands);
  result.alibi_slopes = from_c(given.alibi_slopes, "alibi_slopes");
  result.prefix_sharing = enum_from_c(given.prefix_sharing, PrefixSharing::off, "prefix_sharing");
  result.prefix_sharing_keeps_bits = !is_set(given.prefix_sharing_changes_bits);
  result.prefix_groups = groups_from_c(given.prefix_groups, given.num_prefix_groups);
  return result;
}

PlanLimits from_c(const qkv_plan_limits* limits) {
  const auto given = read_sized(limits, offsetof(qkv_plan_limits, max_keys), "limits");
  return {given.max_requests, given.max_tokens, given.max_query_len,          given.max_seq_len,
          given.max_keys,     given.num_pages,  is_set(given.plans_on_device)};
}

VarlenArguments from_c(const qkv_varlen_arguments* arguments) {
  const auto given = read_sized(arguments, offsetof(qkv_varlen_arguments, lse), "arguments");
  VarlenArguments result;
  result.query = from_c(given.query, "query");
  result.key = from_c(given.key, "key");
  result.value = from_c(given.value, "value");
  result.query_start_loc = from_c(given.query_start_loc, "query_start_loc");
  result.seq_lens = from_c(given.seq_lens, "seq_lens");
  result.block_table = from_c(given.block_table, "block_table");
  if (given.mask != nullptr) result.mask = mask_from_c(given.mask);
  result.mask_operands = operands_from_c(given.mask_operands, given.num_mask_operands);
  if (is_set(given.has_scale)) result.scale = given.scale;
  result.softcap = given.softcap;
  result.alibi_slopes = from_c(given.alibi_slopes, "alibi_slopes");
  result.sinks = from_c(given.sinks, "sinks");
  result.out = from_c(given.out, "out");
  result.lse = from_c(given.lse, "lse");
  result.stream = {given.stream};
  result.key_scale = from_c(given.key_scale, "key_scale");
  result.value_scale = from_c(given.value_scale, "value_scale");
  result.out_scale = from_c(given.out_scale, "out_scale");
  result.query_scale = from_c(given.query_scale, "query_scale");
  return result;
}

std::vector<State> from_c(const qkv_state* states, int64_t num_states) {
  std::vector<State> result;
  for (const qkv_state& state : copy_array(states, num_states, "states")) {
    const std::string name = fmt::format("states[{}]", result.size());
    result.push_back({from_c(state.out, name + ".out"), from_c(state.lse, name + ".lse")});
  }
  return result;
}

std::vector<PrefixLmSpan> from_c(const qkv_prefix_lm_span* spans, int64_t num_spans) {
  std::vector<PrefixLmSpan> result;
  for (const qkv_prefix_lm_span& span : copy_array(spans, num_spans, "spans")) {
    result.push_back({span.request, span.start, span.end});
  }
  return result;
}

}  // namespace qkv::api
