// The functions of qkv.h for MLA prefill over ranks that exchange states.
#include "api/c_collectives.hpp"
#include "api/c_mla.hpp"
#include "api/c_types.hpp"
#include "qkv/mla_context_parallel.hpp"

using namespace qkv;       // NOLINT(google-build-using-namespace): the definitions below are namesakes outside of it
using namespace qkv::api;  // NOLINT(google-build-using-namespace)

struct qkv_mla_context_parallel {
  MlaContextParallel attention;
};

namespace {

const MlaContextParallel& layer_of(const qkv_mla_context_parallel* attention) {
  return required(attention, "attention").attention;
}

}  // namespace

qkv_status qkv_mla_context_parallel_create(const qkv_mla_spec* layer, int32_t interleave_size,
                                           qkv_state_exchange exchange, const qkv_collectives* ranks,
                                           qkv_mla_context_parallel** attention) {
  return create(attention, "attention", [&] {
    const MlaContextParallelSpec spec{from_c(layer), interleave_size,
                                      enum_from_c(exchange, StateExchange::all_gather, "exchange")};
    return MlaContextParallel(spec, required(ranks, "ranks").ranks);
  });
}

void qkv_mla_context_parallel_destroy(qkv_mla_context_parallel* attention) { delete attention; }

qkv_status qkv_mla_context_parallel_shard(const qkv_mla_context_parallel* attention, qkv_shard* shard) {
  return guarded([&] { required(shard, "shard") = to_c(layer_of(attention).shard()); });
}

qkv_status qkv_mla_context_parallel_num_heads(const qkv_mla_context_parallel* attention, int32_t* num_heads) {
  return guarded([&] { required(num_heads, "num_heads") = layer_of(attention).num_heads(); });
}

qkv_status qkv_mla_context_parallel_workspace_bytes(const qkv_mla_context_parallel* attention, int64_t max_new_tokens,
                                                    int64_t workspace_tokens, int64_t* bytes) {
  return guarded(
      [&] { required(bytes, "bytes") = layer_of(attention).workspace_bytes(max_new_tokens, workspace_tokens); });
}

qkv_status qkv_mla_context_parallel_plan(const qkv_mla_context_parallel* attention, const qkv_batch* batch,
                                         const qkv_context_chunk_options* options, qkv_mla_plan** plan,
                                         qkv_stream stream) {
  return create(plan, "plan", [&] { return layer_of(attention).plan(from_c(batch), from_c(options), {stream}); });
}

qkv_status qkv_mla_context_parallel_forward(const qkv_mla_context_parallel* attention, const qkv_tensor* query,
                                            const qkv_tensor* new_latents, const qkv_tensor* latent_cache,
                                            const qkv_mla_plan* plan, const qkv_projection* projection,
                                            const qkv_tensor* workspace, const qkv_tensor* out, const qkv_tensor* lse,
                                            const qkv_tensor* out_scale, const qkv_tensor* latent_scale,
                                            const qkv_stream* gather_stream, qkv_stream stream) {
  return guarded([&] {
    const Stream gathers{gather_stream == nullptr ? stream : *gather_stream};
    layer_of(attention).forward(from_c(query, "query"), from_c(new_latents, "new_latents"),
                                from_c(latent_cache, "latent_cache"), required(plan, "plan").plan,
                                required(projection, "projection").projection, from_c(workspace, "workspace"),
                                from_c(out, "out"), from_c(lse, "lse"), {stream}, gathers,
                                from_c(out_scale, "out_scale"), from_c(latent_scale, "latent_scale"));
  });
}
