// The checks of tensors that a call is handed: shapes against the layer, pages and slots against the cache's size.
#pragma once

#include "plan/plan_data.hpp"
#include "qkv/attention.hpp"
#include "qkv/layer.hpp"
#include "qkv/ops.hpp"

namespace qkv::api {

// `device` is the layer's; on a GPU, tensors must also be aligned for 16-byte accesses.

// A cache for the layer. max_page is the highest page number that the plan uses, -1 for none.
void check_cache(const LayerSpec& layer, Device device, const KvCache& cache, int32_t max_page);
// The scales of keys and values, cached or dense: there if they have some, of the right shape, and numbers above 0
// where the host can read them.
void check_scales(const LayerSpec& layer, Device device, const KvCache& keys, int32_t num_requests);
// A cache that slots up to max_slot are written to.
void check_cache_slots(const LayerSpec& layer, const KvCache& cache, int64_t max_slot);
// Keys and values of new tokens, to be written into the cache.
void check_new_tokens(Device device, const Tensor& key, const Tensor& value, const KvCache& cache, int64_t num_slots);
void check_dense_keys(const LayerSpec& layer, Device device, const Tensor& key, const Tensor& value, int64_t num_keys);
// Contiguous memory of any dtype that the caller lends.
void check_workspace(const Tensor& workspace, Device device, int64_t num_bytes);
void check_query(const LayerSpec& layer, Device device, const Tensor& query, int64_t num_tokens);
void check_out(const LayerSpec& layer, Device device, const Tensor& out, const Tensor& lse, int64_t num_tokens);
// Given with queries of 8-bit floats only: of the whole call, of each KV head, or of each request and head.
void check_query_scale(const LayerSpec& layer, Device device, const Tensor& query_scale, int32_t num_requests);
// Given with outputs of 8-bit floats only.
void check_out_scale(OutputScales scales, const Tensor& out, const Tensor& out_scale, int64_t num_tokens);
// The plan was made for a layer of this kind.
void check_plan_fits(const LayerSpec& layer, uint64_t mask_hash, const plan::PlanData& plan);
void check_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse, const Tensor& out_scale);

// One scale of everything, where a call has a name for it.
void check_single_scale(const Tensor& scale, const char* name, Device device);

// Pages [num_pages, page_size, num_heads, head_dim] with pages up to max_page, and rows for num_rows of their tokens.
// `scale` is given where 8-bit pages become rows of others.
void check_gather(Device device, const Tensor& pages, int32_t max_page, const Tensor& rows, int64_t num_rows,
                  const Tensor& scale);

// Rows to be rounded to 8-bit floats, their scales, and query_start_loc where these are of requests.
void check_quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
                    const Tensor& query_start_loc);

}  // namespace qkv::api
