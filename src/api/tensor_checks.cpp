#include "api/tensor_checks.hpp"

#include <cmath>

#include "core/checks.hpp"
#include "core/eight_bit.hpp"
#include "core/output_scale.hpp"
#include "core/scale_layout.hpp"

namespace qkv::api {
namespace {

constexpr const char* kPagesAxes = "[num_pages, page_size, num_kv_heads, head_dim]";
constexpr const char* kTokensAxes = "[num_tokens, num_heads, head_dim]";

// Kernels of GPUs load and store 16 bytes at once.
void check_place(const Tensor& tensor, const char* name, Device device) {
  check_device(tensor, name, device);
  if (device.kind == DeviceKind::cuda) check_aligned(tensor, name, 16);
}

void check_pages(const Tensor& pages, const char* name, Device device) {
  check_rank(pages, name, 4, kPagesAxes);
  check_place(pages, name, device);
  check_last_axis_contiguous(pages, name);
}

void check_tokens(const Tensor& tensor, const char* name, Device device) {
  check_rank(tensor, name, 3, kTokensAxes);
  check_place(tensor, name, device);
  check_last_axis_contiguous(tensor, name);
}

void check_absent_scale(const Tensor& scale, const char* name, DType dtype) {
  if (!scale.is_given()) return;
  refuse(name, scale.describe(), fmt::format("none with {}: only 8-bit elements are scaled", to_string(dtype)),
         ErrorCode::mismatch);
}

// `key`: pages, or dense keys.
void check_scale_shape(const Tensor& scale, const char* name, const LayerSpec& layer, const Tensor& key,
                       int32_t num_requests) {
  const int64_t num_kv_heads = layer.num_kv_heads;
  switch (layer.kv_scales) {
    case KvScales::none:
      break;
    case KvScales::per_tensor:
      check_rank(scale, name, 1, "[1], per_tensor");
      check_extent(scale, name, 0, 1, "one scale");
      break;
    case KvScales::per_head:
      check_rank(scale, name, 1, "[num_kv_heads], per_head");
      check_extent(scale, name, 0, num_kv_heads, "num_kv_heads");
      break;
    case KvScales::per_request_head:
      check_rank(scale, name, 2, "[num_requests, num_kv_heads], per_request_head");
      check_extent(scale, name, 0, num_requests, "num_requests");
      check_extent(scale, name, 1, num_kv_heads, "num_kv_heads");
      break;
    case KvScales::per_token_head:
      if (!layer.cache) {
        check_rank(scale, name, 3, "[num_keys, num_kv_heads, 1], per_token_head");
        check_extent(scale, name, 0, key.shape[0], "the key's rows");
        check_extent(scale, name, 1, num_kv_heads, "num_kv_heads");
        check_extent(scale, name, 2, 1, "one scale");
        break;
      }
      check_rank(scale, name, 3, "[num_pages, page_size, num_kv_heads], per_token_head");
      check_extent(scale, name, 0, key.shape[0], "the key's num_pages");
      check_extent(scale, name, 1, key.shape[1], "page_size");
      check_extent(scale, name, 2, num_kv_heads, "num_kv_heads");
      break;
  }
}

// Of a tensor of rank 1 or 2 that the host reads.
void check_scale_values(const Tensor& scale, const char* name) {
  const auto* values = static_cast<const float*>(scale.data);
  const bool is_matrix = scale.rank == 2;
  for (int64_t i = 0; i < scale.shape[0]; ++i) {
    for (int64_t j = 0; j < (is_matrix ? scale.shape[1] : 1); ++j) {
      const float value = values[i * scale.stride[0] + (is_matrix ? j * scale.stride[1] : 0)];
      if (value > 0 && std::isfinite(value)) continue;
      refuse(is_matrix ? fmt::format("{}[{}, {}]", name, i, j) : fmt::format("{}[{}]", name, i), value,
             "a finite number above 0");
    }
  }
}

template <class Value>
void check_same(const char* name, const Value& of_plan, const Value& of_layer) {
  if (of_plan == of_layer) return;
  refuse("plan", fmt::format("a plan made for {} = {}", name, of_plan),
         fmt::format("a plan of this layer: {} = {}", name, of_layer), ErrorCode::mismatch);
}

// Prefix sums over the tokens of `rows`, where scales are of requests. Looked through where the host can read them.
void check_token_requests(const Tensor& query_start_loc, const Tensor& scale, const Tensor& rows) {
  constexpr const char* kName = "query_start_loc";
  if (scale.rank != 2) {
    if (!query_start_loc.is_given()) return;
    refuse(kName, query_start_loc.describe(), "none with scales that are not of requests", ErrorCode::mismatch);
  }
  check_rank(query_start_loc, kName, 1, "[num_requests + 1], since scales are of requests");
  check_dtype(query_start_loc, kName, DType::i32);
  check_device(query_start_loc, kName, rows.device);
  check_contiguous(query_start_loc, kName);
  check_extent(query_start_loc, kName, 0, scale.shape[0] + 1, "one more than the scale's num_requests");
  if (rows.device.kind != DeviceKind::cpu) return;
  const auto* starts = static_cast<const int32_t*>(query_start_loc.data);
  if (starts[0] != 0) refuse("query_start_loc[0]", starts[0], "0");
  for (int64_t r = 0; r < scale.shape[0]; ++r) {
    if (starts[r + 1] >= starts[r] && starts[r + 1] <= rows.shape[0]) continue;
    refuse(fmt::format("query_start_loc[{}]", r + 1), starts[r + 1],
           fmt::format("{} to {}: prefix sums of the tokens of rows", starts[r], rows.shape[0]));
  }
}

}  // namespace

void check_cache(const LayerSpec& layer, Device device, const KvCache& cache, int32_t max_page) {
  check_pages(cache.key, "cache.key", device);
  check_pages(cache.value, "cache.value", device);
  check_dtype(cache.key, "cache.key", layer.kv_dtype);
  check_dtype(cache.value, "cache.value", layer.kv_dtype);
  check_extent(cache.key, "cache.key", 1, layer.cache->page_size, "page_size");
  check_extent(cache.key, "cache.key", 2, layer.num_kv_heads, "num_kv_heads");
  check_extent(cache.key, "cache.key", 3, layer.head_dim, "head_dim");
  check_extent(cache.value, "cache.value", 0, cache.key.shape[0], "the key's num_pages");
  check_extent(cache.value, "cache.value", 1, layer.cache->page_size, "page_size");
  check_extent(cache.value, "cache.value", 2, layer.num_kv_heads, "num_kv_heads");
  check_extent(cache.value, "cache.value", 3, layer.value_dim(), "head_dim_v");
  if (max_page >= cache.key.shape[0]) {
    refuse("block_table", fmt::format("page {}", max_page),
           fmt::format("page numbers below {}, the cache's num_pages", cache.key.shape[0]), ErrorCode::mismatch);
  }
}

void check_scales(const LayerSpec& layer, Device device, const KvCache& keys, int32_t num_requests) {
  const std::string prefix = layer.cache ? "cache." : "";
  for (const auto& [scale, name] :
       {std::pair{&keys.key_scale, prefix + "key_scale"}, {&keys.value_scale, prefix + "value_scale"}}) {
    if (layer.kv_scales == KvScales::none) {
      check_absent_scale(*scale, name.c_str(), layer.kv_dtype);
      continue;
    }
    check_scale_shape(*scale, name.c_str(), layer, keys.key, num_requests);
    check_dtype(*scale, name.c_str(), DType::f32);
    check_device(*scale, name.c_str(), device);
    // Those of tokens may be anything where nobody reads the token.
    const bool is_read_whole = layer.kv_scales != KvScales::per_token_head;
    if (is_read_whole && device.kind == DeviceKind::cpu) check_scale_values(*scale, name.c_str());
  }
}

void check_cache_slots(const LayerSpec& layer, const KvCache& cache, int64_t max_slot) {
  check_writable_layout(cache.key, "cache.key");
  check_writable_layout(cache.value, "cache.value");
  if (layer.kv_scales == KvScales::per_token_head) {
    check_writable_layout(cache.key_scale, "cache.key_scale");
    check_writable_layout(cache.value_scale, "cache.value_scale");
  }
  const int64_t num_slots = cache.key.shape[0] * cache.key.shape[1];
  if (max_slot >= num_slots) {
    refuse("slot_mapping", fmt::format("slot {}", max_slot),
           fmt::format("slots below {}: the cache has {} pages of {} tokens", num_slots, cache.key.shape[0],
                       cache.key.shape[1]),
           ErrorCode::mismatch);
  }
}

void check_new_tokens(Device device, const Tensor& key, const Tensor& value, const KvCache& cache, int64_t num_slots) {
  check_tokens(key, "key", device);
  check_tokens(value, "value", device);
  check_float16_or_32(key, "key");
  check_float16_or_32(value, "value");
  check_extent_at_least(key, "key", 0, num_slots, "one row a slot");
  check_extent_at_least(value, "value", 0, num_slots, "one row a slot");
  check_extent(key, "key", 1, cache.key.shape[2], "the cache's num_kv_heads");
  check_extent(value, "value", 1, cache.value.shape[2], "the cache's num_kv_heads");
  check_extent(key, "key", 2, cache.key.shape[3], "the cache's head_dim");
  check_extent(value, "value", 2, cache.value.shape[3], "the cache's head_dim_v");
}

void check_dense_keys(const LayerSpec& layer, Device device, const Tensor& key, const Tensor& value, int64_t num_keys) {
  check_tokens(key, "key", device);
  check_tokens(value, "value", device);
  check_dtype(key, "key", layer.kv_dtype);
  check_dtype(value, "value", layer.kv_dtype);
  check_extent_at_least(key, "key", 0, num_keys, "one row a key: seq_lens, or what of them the layer is shown");
  check_extent_at_least(value, "value", 0, num_keys, "one row a key: seq_lens, or what of them the layer is shown");
  check_extent(key, "key", 1, layer.num_kv_heads, "num_kv_heads");
  check_extent(value, "value", 1, layer.num_kv_heads, "num_kv_heads");
  check_extent(key, "key", 2, layer.head_dim, "head_dim");
  check_extent(value, "value", 2, layer.value_dim(), "head_dim_v");
}

void check_workspace(const Tensor& workspace, Device device, int64_t num_bytes) {
  if (num_bytes == 0) return;
  check_given(workspace, "workspace", "contiguous memory of any dtype");
  check_device(workspace, "workspace", device);
  check_contiguous(workspace, "workspace");
  check_aligned(workspace, "workspace", 16);
  if (const int64_t bytes = workspace.num_elements() * size_bytes(workspace.dtype); bytes < num_bytes) {
    refuse("workspace", fmt::format("{} bytes", bytes), fmt::format("at least {} bytes", num_bytes));
  }
}

void check_query(const LayerSpec& layer, Device device, const Tensor& query, int64_t num_tokens) {
  check_tokens(query, "query", device);
  check_dtype(query, "query", layer.query_dtype);
  check_extent_at_least(query, "query", 0, num_tokens, "num_tokens");
  check_extent(query, "query", 1, layer.num_q_heads, "num_q_heads");
  check_extent(query, "query", 2, layer.head_dim, "head_dim");
}

void check_query_scale(const LayerSpec& layer, Device device, const Tensor& query_scale, int32_t num_requests) {
  constexpr const char* kName = "query_scale";
  constexpr const char* kAxes = "[1], [num_kv_heads] or [num_requests, num_kv_heads], f32, since queries are 8-bit";
  if (!is_float8(layer.query_dtype)) return check_absent_scale(query_scale, kName, layer.query_dtype);
  check_given(query_scale, kName, kAxes);
  const bool of_requests = query_scale.rank == 2;
  check_rank(query_scale, kName, of_requests ? 2 : 1, kAxes);
  if (of_requests) check_extent(query_scale, kName, 0, num_requests, "num_requests");
  if (query_scales(query_scale) != KvScales::per_tensor) {
    check_extent(query_scale, kName, of_requests ? 1 : 0, layer.num_kv_heads, "num_kv_heads");
  }
  check_dtype(query_scale, kName, DType::f32);
  check_device(query_scale, kName, device);
  if (device.kind == DeviceKind::cpu) check_scale_values(query_scale, kName);
}

void check_out(const LayerSpec& layer, Device device, const Tensor& out, const Tensor& lse, int64_t num_tokens) {
  check_tokens(out, "out", device);
  check_writable_layout(out, "out");
  check_dtype(out, "out", layer.out_dtype());
  check_extent_at_least(out, "out", 0, num_tokens, "num_tokens");
  check_extent(out, "out", 1, layer.num_q_heads, "num_q_heads");
  check_extent(out, "out", 2, layer.value_dim(), "head_dim_v");
  if (!lse.is_given()) return;
  check_rank(lse, "lse", 2, "[num_q_heads, num_tokens]");
  check_device(lse, "lse", device);
  check_aligned(lse, "lse", sizeof(float));
  check_dtype(lse, "lse", DType::f32);
  check_writable_layout(lse, "lse");
  check_extent(lse, "lse", 0, layer.num_q_heads, "num_q_heads");
  check_extent_at_least(lse, "lse", 1, num_tokens, "num_tokens");
}

void check_out_scale(OutputScales scales, const Tensor& out, const Tensor& out_scale, int64_t num_tokens) {
  constexpr const char* kName = "out_scale";
  if (!is_float8(out.dtype)) return check_absent_scale(out_scale, kName, out.dtype);
  if (scales == OutputScales::per_tensor) return check_single_scale(out_scale, kName, out.device);
  check_rank(out_scale, kName, 3, "[num_tokens, num_q_heads, groups], per_token_group");
  check_dtype(out_scale, kName, DType::f32);
  check_device(out_scale, kName, out.device);
  check_extent_at_least(out_scale, kName, 0, num_tokens, "num_tokens");
  check_extent(out_scale, kName, 1, out.shape[1], "num_q_heads");
  check_extent(out_scale, kName, 2, index::num_scale_groups(static_cast<int32_t>(out.shape[2])),
               "groups of 128 columns of a head");
  check_aligned(out_scale, kName, sizeof(float));
  check_writable_layout(out_scale, kName);
}

void check_single_scale(const Tensor& scale, const char* name, Device device) {
  check_rank(scale, name, 1, "[1], f32, since it belongs to 8-bit elements");
  check_extent(scale, name, 0, 1, "one scale");
  check_dtype(scale, name, DType::f32);
  check_device(scale, name, device);
  if (device.kind == DeviceKind::cpu) check_scale_values(scale, name);
}

void check_gather(Device device, const Tensor& pages, int32_t max_page, const Tensor& rows, int64_t num_rows,
                  const Tensor& scale) {
  // The one place that says what can be gathered.
  if (!is_8bit(pages.dtype)) check_float16_or_32(pages, "pages");
  check_device(pages, "pages", device);
  check_last_axis_contiguous(pages, "pages");
  check_rank(rows, "rows", 3, kTokensAxes);
  if (is_8bit(pages.dtype) && rows.dtype != pages.dtype) {
    check_float16_or_32(rows, "rows");
    check_single_scale(scale, "scale", device);
  } else {
    check_dtype(rows, "rows", pages.dtype);
    if (scale.is_given()) {
      refuse("scale", scale.describe(), fmt::format("none for rows of the pages' dtype, {}", to_string(rows.dtype)),
             ErrorCode::mismatch);
    }
  }
  check_device(rows, "rows", device);
  check_last_axis_contiguous(rows, "rows");
  check_writable_layout(rows, "rows");
  check_extent_at_least(rows, "rows", 0, num_rows, "one row a token");
  check_extent(rows, "rows", 1, pages.shape[2], "num_heads of pages");
  check_extent(rows, "rows", 2, pages.shape[3], "head_dim of pages");
  if (max_page >= pages.shape[0]) {
    refuse("block_table", fmt::format("page {}", max_page),
           fmt::format("page numbers below {}, the cache's num_pages", pages.shape[0]), ErrorCode::mismatch);
  }
}

void check_quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
                    const Tensor& query_start_loc) {
  const Device device = rows.device;
  check_tokens(rows, "rows", device);
  check_float16_or_32(rows, "rows");
  check_tokens(out, "out", device);
  check_writable_layout(out, "out");
  if (!is_float8(out.dtype)) refuse("out", out.describe(), "f8e4m3 or f8e5m2");
  for (const auto& [axis, meaning] :
       {std::pair{0, "num_tokens of rows"}, {1, "num_heads of rows"}, {2, "head_dim of rows"}}) {
    check_extent(out, "out", axis, rows.shape[axis], meaning);
  }
  check_given(scale, "scale", "[1], [num_scales] or [num_requests, num_scales], f32");
  const bool of_requests = scale.rank == 2;
  check_rank(scale, "scale", of_requests ? 2 : 1, "[1], [num_scales] or [num_requests, num_scales], f32");
  check_dtype(scale, "scale", DType::f32);
  check_device(scale, "scale", device);
  check_aligned(scale, "scale", sizeof(float));
  if (const int64_t num_scales = scale.shape[scale.rank - 1]; num_scales < 1 || rows.shape[1] % num_scales != 0) {
    refuse("scale", scale.describe(),
           fmt::format("scales of which {}, num_heads of rows, is a multiple", rows.shape[1]));
  }
  if (source == ScaleSource::chosen) {
    check_writable_layout(scale, "scale");
  } else if (device.kind == DeviceKind::cpu) {
    check_scale_values(scale, "scale");
  }
  check_token_requests(query_start_loc, scale, rows);
}

void check_plan_fits(const LayerSpec& layer, uint64_t mask_hash, const plan::PlanData& plan) {
  if (plan.planner && plan.planner->newest != plan.number) {
    refuse("plan", fmt::format("number {} of its planner's plans", plan.number),
           fmt::format("number {}, the newest: the planner's memory holds no other", plan.planner->newest.load()),
           ErrorCode::mismatch);
  }
  const LayerSpec& made_for = plan.layer;
  const auto page_size = [](const LayerSpec& spec) { return spec.cache ? spec.cache->page_size : 0; };
  check_same("num_q_heads", made_for.num_q_heads, layer.num_q_heads);
  check_same("num_kv_heads", made_for.num_kv_heads, layer.num_kv_heads);
  check_same("head_dim", made_for.head_dim, layer.head_dim);
  check_same("head_dim_v", made_for.value_dim(), layer.value_dim());
  check_same("query_dtype", to_string(made_for.query_dtype), to_string(layer.query_dtype));
  check_same("kv_dtype", to_string(made_for.kv_dtype), to_string(layer.kv_dtype));
  check_same("kv_scales", to_string(made_for.kv_scales), to_string(layer.kv_scales));
  check_same("output_dtype", to_string(made_for.out_dtype()), to_string(layer.out_dtype()));
  check_same("output_scales", to_string(made_for.output_scales), to_string(layer.output_scales));
  check_same("type", to_string(made_for.type), to_string(layer.type));
  check_same("cache.page_size", page_size(made_for), page_size(layer));
  check_same("key_run", to_string(made_for.key_run), to_string(layer.key_run));
  check_same("shard.rank", made_for.shard.rank, layer.shard.rank);
  check_same("shard.num_ranks", made_for.shard.num_ranks, layer.shard.num_ranks);
  check_same("shard.interleave_size", made_for.shard.interleave_size, layer.shard.interleave_size);
  check_same("alibi_per_request", made_for.alibi_per_request, layer.alibi_per_request);
  if (plan.mask_hash != mask_hash) {
    refuse("plan", fmt::format("a plan made for the mask {}", made_for.effective_mask().text()),
           fmt::format("a plan of this layer, whose mask is {}", layer.effective_mask().text()), ErrorCode::mismatch);
  }
}

void check_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, const Tensor& out_scale) {
  if (states.empty()) refuse("states", "none", "at least one state");
  const Device device = out.device;
  check_tokens(out, "out", device);
  if (!is_float8(out.dtype)) check_float16_or_32(out, "out");
  check_writable_layout(out, "out");
  check_out_scale(output_scales(out_scale), out, out_scale, out.shape[0]);
  const auto check_lse = [&](const Tensor& tensor, const char* name) {
    check_rank(tensor, name, 2, "[num_heads, num_tokens]");
    check_device(tensor, name, device);
    check_aligned(tensor, name, sizeof(float));
    check_dtype(tensor, name, DType::f32);
    check_extent(tensor, name, 0, out.shape[1], "num_heads of out");
    check_extent(tensor, name, 1, out.shape[0], "num_tokens of out");
  };
  for (size_t s = 0; s < states.size(); ++s) {
    const std::string name = fmt::format("states[{}]", s);
    check_tokens(states[s].out, (name + ".out").c_str(), device);
    check_float16_or_32(states[s].out, (name + ".out").c_str());
    check_extent(states[s].out, (name + ".out").c_str(), 0, out.shape[0], "num_tokens of out");
    check_extent(states[s].out, (name + ".out").c_str(), 1, out.shape[1], "num_heads of out");
    check_extent(states[s].out, (name + ".out").c_str(), 2, out.shape[2], "head_dim_v of out");
    check_lse(states[s].lse, (name + ".lse").c_str());
  }
  if (!lse.is_given()) return;
  check_lse(lse, "lse");
  check_writable_layout(lse, "lse");
}

}  // namespace qkv::api
