#include "qkv/ops.hpp"

#include <algorithm>
#include <numbers>

#include "api/engines.hpp"
#include "api/tensor_checks.hpp"
#include "core/checks.hpp"
#include "core/eight_bit.hpp"
#include "core/output_scale.hpp"
#include "plan/builder.hpp"
#include "plan/gather.hpp"

namespace qkv {
namespace {

std::vector<float> read_per_head(const Tensor& tensor, const char* name) {
  check_rank(tensor, name, 1, "[num_q_heads]");
  check_dtype(tensor, name, DType::f32);
  check_host(tensor, name);
  std::vector<float> values;
  for (int64_t head = 0; head < tensor.shape[0]; ++head) {
    values.push_back(static_cast<const float*>(tensor.data)[head * tensor.stride[0]]);
  }
  return values;
}

// What the scales of a single call belong to, by their shape.
KvScales scales_of(const Tensor& keys, const Tensor& scale, const char* name) {
  if (!is_8bit(keys.dtype)) return KvScales::none;
  check_given(scale, name, "f32, since keys and values are 8-bit");
  if (scale.rank == 1) return scale.shape[0] == 1 ? KvScales::per_tensor : KvScales::per_head;
  if (scale.rank == 2) return KvScales::per_request_head;
  return KvScales::per_token_head;
}

// The layer that the tensors of a varlen call amount to.
LayerSpec layer_of(const VarlenArguments& arguments) {
  const bool paged = arguments.block_table.is_given();
  const int32_t key_rank = paged ? 4 : 3;
  check_rank(arguments.query, "query", 3, "[num_tokens, num_q_heads, head_dim]");
  for (const auto& [tensor, name] : {std::pair{&arguments.key, "key"}, std::pair{&arguments.value, "value"}}) {
    check_rank(*tensor, name, key_rank,
               paged ? "[num_pages, page_size, num_kv_heads, head_dim], since block_table is given"
                     : "[num_keys, num_kv_heads, head_dim], since block_table is not given");
  }
  check_given(arguments.out, "out", "[num_tokens, num_q_heads, head_dim_v]");
  LayerSpec layer;
  layer.num_q_heads = static_cast<int32_t>(arguments.query.shape[1]);
  layer.num_kv_heads = static_cast<int32_t>(arguments.key.shape[key_rank - 2]);
  layer.head_dim = static_cast<int32_t>(arguments.query.shape[2]);
  layer.head_dim_v = static_cast<int32_t>(arguments.value.shape[key_rank - 1]);
  layer.query_dtype = arguments.query.dtype;
  layer.kv_dtype = arguments.key.dtype;
  layer.output_dtype = arguments.out.dtype;
  layer.output_scales = output_scales(arguments.out_scale);
  layer.kv_scales = scales_of(arguments.key, arguments.key_scale, "key_scale");
  if (paged) layer.cache = CacheSpec{static_cast<int32_t>(arguments.key.shape[1])};
  layer.mask = arguments.mask;
  layer.scale = arguments.scale;
  layer.softcap = arguments.softcap;
  if (arguments.alibi_slopes.rank == 2) {
    layer.alibi_per_request = true;
  } else if (arguments.alibi_slopes.is_given()) {
    layer.alibi_slopes = read_per_head(arguments.alibi_slopes, "alibi_slopes");
  }
  if (arguments.sinks.is_given()) layer.sinks = read_per_head(arguments.sinks, "sinks");
  return layer;
}

std::vector<int32_t> read_host_lengths(const Tensor& tensor, const char* name, const char* axes) {
  check_rank(tensor, name, 1, axes);
  check_dtype(tensor, name, DType::i32);
  check_host(tensor, name);
  std::vector<int32_t> values;
  for (int64_t i = 0; i < tensor.shape[0]; ++i) {
    const int32_t value = static_cast<const int32_t*>(tensor.data)[i * tensor.stride[0]];
    if (value < 0) refuse(fmt::format("{}[{}]", name, i), value, "0 or more");
    values.push_back(value);
  }
  return values;
}

// Rows of latents have one head.
Tensor with_head_axis(Tensor tensor, int32_t rank) {
  if (tensor.rank != rank - 1) return tensor;
  tensor.shape[rank - 1] = tensor.shape[rank - 2];
  tensor.stride[rank - 1] = tensor.stride[rank - 2];
  tensor.shape[rank - 2] = 1;
  tensor.stride[rank - 2] = tensor.shape[rank - 1];
  tensor.rank = rank;
  return tensor;
}

}  // namespace

void varlen_attention(const VarlenArguments& arguments) {
  const Attention attention(layer_of(arguments), arguments.query.device);
  Batch batch;
  batch.query_start_loc = arguments.query_start_loc;
  batch.seq_lens = arguments.seq_lens;
  batch.block_table = arguments.block_table;
  batch.mask_operands = arguments.mask_operands;
  if (attention.spec().alibi_per_request) batch.alibi_slopes = arguments.alibi_slopes;
  const Plan plan = attention.plan(batch, arguments.stream);
  if (attention.spec().cache) {
    const KvCache cache{arguments.key, arguments.value, arguments.key_scale, arguments.value_scale};
    attention.forward(arguments.query, cache, plan, arguments.out, arguments.lse, arguments.stream, arguments.out_scale,
                      arguments.query_scale);
  } else {
    attention.forward(arguments.query, arguments.key, arguments.value, plan, arguments.out, arguments.lse,
                      arguments.stream, arguments.out_scale, arguments.query_scale, arguments.key_scale,
                      arguments.value_scale);
  }
}

void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, Stream stream,
                  const Tensor& out_scale) {
  api::check_states(states, out, lse, out_scale);
  api::engine_of(out.device).merge_states(states, out, lse, out_scale, stream);
}

void lse_from_lse2(const Tensor& lse) {
  check_given(lse, "lse", "f32");
  check_dtype(lse, "lse", DType::f32);
  check_host(lse, "lse");
  check_writable_layout(lse, "lse");
  std::array<int64_t, Tensor::kMaxRank> index{};
  for (int64_t remaining = lse.num_elements(); remaining > 0; --remaining) {
    int64_t offset = 0;
    for (int32_t axis = 0; axis < lse.rank; ++axis) offset += index[axis] * lse.stride[axis];
    static_cast<float*>(lse.data)[offset] *= std::numbers::ln2_v<float>;
    for (int32_t axis = lse.rank - 1; axis >= 0; --axis) {  // the next index, row-major
      if (++index[axis] < lse.shape[axis]) break;
      index[axis] = 0;
    }
  }
}

void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, const Tensor& slot_mapping,
                 Stream stream) {
  check_rank(slot_mapping, "slot_mapping", 1, "[num_slots]");
  check_dtype(slot_mapping, "slot_mapping", DType::i64);
  check_host(slot_mapping, "slot_mapping");
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < slot_mapping.shape[0]; ++t) {
    slots.push_back(static_cast<const int64_t*>(slot_mapping.data)[t * slot_mapping.stride[0]]);
  }
  // The cache says what the layer is: its own extents are checked against each other.
  check_rank(cache.key, "cache.key", 4, "[num_pages, page_size, num_kv_heads, head_dim]");
  check_rank(cache.value, "cache.value", 4, "[num_pages, page_size, num_kv_heads, head_dim_v]");
  if (!is_8bit(cache.key.dtype)) check_float16_or_32(cache.key, "cache.key");
  const KvScales scales = scales_of(cache.key, cache.key_scale, "cache.key_scale");
  if (scales == KvScales::per_request_head) {
    refuse("cache.key_scale", cache.key_scale.describe(),
           "[1], [num_kv_heads] or [num_pages, page_size, num_kv_heads]: scales per request take update_cache");
  }
  LayerSpec layer;
  layer.num_kv_heads = static_cast<int32_t>(cache.key.shape[2]);
  layer.head_dim = static_cast<int32_t>(cache.key.shape[3]);
  layer.head_dim_v = static_cast<int32_t>(cache.value.shape[3]);
  layer.kv_dtype = cache.key.dtype;
  layer.kv_scales = scales;
  layer.cache = CacheSpec{static_cast<int32_t>(cache.key.shape[1])};
  const Device device = cache.key.device;
  api::check_cache(layer, device, cache, -1);
  api::check_scales(layer, device, cache, 0);
  api::check_cache_slots(layer, cache, plan::check_slots(slots));
  api::check_new_tokens(device, key, value, cache, static_cast<int64_t>(slots.size()));
  api::engine_of(device).cache_write(key, value, cache, scales, slots, stream);
}

std::string_view to_string(ScaleSource source) { return source == ScaleSource::given ? "given" : "chosen"; }

void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
              const Tensor& query_start_loc, Stream stream) {
  api::check_quantise(rows, out, scale, source, query_start_loc);
  if (scale.num_elements() == 0) return;  // no requests
  api::engine_of(rows.device).quantise(rows, out, scale, source, query_start_loc, stream);
}

void gather_cache(const Tensor& pages, const Tensor& block_table, const Tensor& starts, const Tensor& cu_seq_lens,
                  const Tensor& rows, Stream stream, const Tensor& scale) {
  const Tensor pages_of_heads = with_head_axis(pages, 4);
  check_rank(pages_of_heads, "pages", 4, "[num_pages, page_size, num_heads, head_dim], or without num_heads");
  const std::vector<int32_t> first = read_host_lengths(starts, "starts", "[num_requests]");
  const std::vector<int32_t> sums = read_host_lengths(cu_seq_lens, "cu_seq_lens", "[num_requests + 1]");
  check_extent(cu_seq_lens, "cu_seq_lens", 0, starts.shape[0] + 1, "one more than starts");
  if (sums[0] != 0) refuse("cu_seq_lens[0]", sums[0], "0");
  std::vector<int32_t> lengths;
  for (size_t i = 0; i < first.size(); ++i) {
    if (sums[i + 1] < sums[i]) {
      refuse(fmt::format("cu_seq_lens[{}]", i + 1), sums[i + 1],
             fmt::format("at least cu_seq_lens[{}] = {}: prefix sums never decrease", i, sums[i]));
    }
    lengths.push_back(sums[i + 1] - sums[i]);
  }
  check_rank(block_table, "block_table", 2, "[num_requests, max_pages]");
  check_extent(block_table, "block_table", 0, starts.shape[0], "num_requests");
  if (pages_of_heads.shape[1] < 1) refuse("pages", pages.describe(), "pages of at least 1 token");
  const auto page_size = static_cast<int32_t>(pages_of_heads.shape[1]);
  plan::GatherPlan plan = plan::build_gather(block_table, 0, first, lengths, page_size);
  const Tensor rows_of_heads = with_head_axis(rows, 3);
  const Device device = pages.device;
  api::check_gather(device, pages_of_heads, plan.max_page, rows_of_heads, plan.num_rows(), scale);
  const plan::Engine& engine = api::engine_of(device);
  engine.place(plan, stream);
  engine.gather(pages_of_heads, plan, rows_of_heads, scale, stream);
}

}  // namespace qkv
