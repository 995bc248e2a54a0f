// The functions of qkv.h for MLA prefill.
#include "api/c_mla.hpp"

#include "api/c_collectives.hpp"
#include "api/c_types.hpp"

using namespace qkv;       // NOLINT(google-build-using-namespace): the definitions below are namesakes outside of it
using namespace qkv::api;  // NOLINT(google-build-using-namespace)

struct qkv_mla_prefill {
  MlaPrefill prefill;
};

namespace {

const int32_t* array_of(const std::vector<int32_t>& values) { return values.empty() ? nullptr : values.data(); }

qkv_context_chunk chunk_to_c(const ContextChunk& chunk) {
  qkv_context_chunk result{};
  result.index = chunk.index;
  result.request_begin = chunk.request_begin;
  result.request_end = chunk.request_end;
  result.token_begin = chunk.tokens.begin;
  result.token_end = chunk.tokens.end;
  result.is_continuation = chunk.is_continuation ? 1 : 0;
  result.continuation_token_end = chunk.continuation_token_end;
  result.num_context_tokens = chunk.num_context_tokens;
  result.max_query_len = chunk.max_query_len;
  result.max_seq_len = chunk.max_seq_len;
  result.query_start_loc = array_of(chunk.query_start_loc);
  result.cu_seq_lens = array_of(chunk.cu_seq_lens);
  result.starts = array_of(chunk.starts);
  result.seq_lens = array_of(chunk.seq_lens);
  result.token_to_seq = array_of(chunk.token_to_seq);
  result.local_seq_lens = array_of(chunk.local_seq_lens);
  result.padded_local_seq_lens = array_of(chunk.padded_local_seq_lens);
  result.padded_local_cu_seq_lens = array_of(chunk.padded_local_cu_seq_lens);
  result.local_starts = array_of(chunk.local_starts);
  result.all_gathered_rows = array_of(chunk.all_gathered_rows);
  return result;
}

State state_from_c(const qkv_state* state, const char* name) {
  const qkv_state& given = required(state, name);
  return {from_c(given.out, std::string(name) + ".out"), from_c(given.lse, std::string(name) + ".lse")};
}

template <class Value, class Read>
qkv_status read_plan(const qkv_mla_plan* plan, Value* value, const char* name, const Read& read) noexcept {
  return guarded([&] { required(value, name) = read(required(plan, "plan").plan); });
}

}  // namespace

void qkv_mla_spec_init(qkv_mla_spec* spec, size_t struct_size) { init_sized(spec, struct_size); }
void qkv_context_chunk_options_init(qkv_context_chunk_options* options, size_t struct_size) {
  init_sized(options, struct_size);
}

qkv_status qkv_mla_explain(const qkv_mla_spec* spec, qkv_device device, char* text, size_t capacity, size_t* needed) {
  return guarded([&] {
    const std::vector<std::string> reasons = explain(from_c(spec), from_c(device, "device"));
    copy_text(fmt::format("{}", fmt::join(reasons, "\n")), text, capacity, needed);
  });
}

qkv_status qkv_default_workspace_tokens(const qkv_context_chunk_options* options, int64_t max_model_len,
                                        int64_t max_num_requests, int32_t* workspace_tokens) {
  return guarded([&] {
    required(workspace_tokens, "workspace_tokens") =
        default_workspace_tokens(from_c(options), max_model_len, max_num_requests);
  });
}

qkv_status qkv_matrix_projection_create(const qkv_mla_spec* spec, const qkv_tensor* kv_b_proj,
                                        qkv_projection** projection) {
  return create(projection, "projection",
                [&] { return matrix_projection(from_c(spec), from_c(kv_b_proj, "kv_b_proj")); });
}

qkv_status qkv_projection_create(qkv_project project, void* context, qkv_projection** projection) {
  return create(projection, "projection", [&]() -> Projection {
    if (project == nullptr) refuse("project", "a null pointer", "the address of a function");
    return [project, context](const ProjectionCall& call) {
      const qkv_tensor latents = to_c(call.latents);
      const qkv_tensor key_nope = to_c(call.key_nope);
      const qkv_tensor value = to_c(call.value);
      const int32_t result = project(context, &latents, &key_nope, &value, call.stream.handle);
      if (result != 0) refuse("project", fmt::format("result {}", result), "0: the caller's projection failed");
    };
  });
}

void qkv_projection_destroy(qkv_projection* projection) { delete projection; }

qkv_status qkv_mla_prefill_create(const qkv_mla_spec* spec, qkv_device device, qkv_mla_prefill** prefill) {
  return create(prefill, "prefill", [&] { return MlaPrefill(from_c(spec), from_c(device, "device")); });
}

void qkv_mla_prefill_destroy(qkv_mla_prefill* prefill) { delete prefill; }

qkv_status qkv_mla_prefill_workspace_bytes(const qkv_mla_prefill* prefill, int64_t max_new_tokens,
                                           int64_t workspace_tokens, int32_t num_ranks, int64_t* bytes) {
  return guarded([&] {
    required(bytes, "bytes") =
        required(prefill, "prefill")
            .prefill.workspace_bytes(max_new_tokens, workspace_tokens, num_ranks == 0 ? 1 : num_ranks);
  });
}

qkv_status qkv_mla_prefill_plan(const qkv_mla_prefill* prefill, const qkv_batch* batch,
                                const qkv_context_chunk_options* options, qkv_mla_plan** plan, qkv_stream stream) {
  return create(plan, "plan",
                [&] { return required(prefill, "prefill").prefill.plan(from_c(batch), from_c(options), {stream}); });
}

void qkv_mla_plan_destroy(qkv_mla_plan* plan) { delete plan; }

qkv_status qkv_mla_plan_num_tokens(const qkv_mla_plan* plan, int64_t* num_tokens) {
  return read_plan(plan, num_tokens, "num_tokens", [](const MlaPlan& of) { return of.num_tokens(); });
}

qkv_status qkv_mla_plan_num_chunks(const qkv_mla_plan* plan, int32_t* num_chunks) {
  return read_plan(plan, num_chunks, "num_chunks",
                   [](const MlaPlan& of) { return static_cast<int32_t>(of.chunks().size()); });
}

qkv_status qkv_mla_plan_chunk(const qkv_mla_plan* plan, int32_t index, qkv_context_chunk* chunk) {
  return read_plan(plan, chunk, "chunk", [&](const MlaPlan& of) {
    const auto num_chunks = static_cast<int32_t>(of.chunks().size());
    if (index < 0 || index >= num_chunks) refuse("index", index, fmt::format("0 or more, below {}", num_chunks));
    return chunk_to_c(of.chunks()[index]);
  });
}

qkv_status qkv_mla_plan_workspace_bytes(const qkv_mla_plan* plan, int64_t* bytes) {
  return read_plan(plan, bytes, "bytes", [](const MlaPlan& of) { return of.workspace_bytes(); });
}

qkv_status qkv_mla_run_new_tokens(const qkv_mla_prefill* prefill, const qkv_tensor* query, const qkv_tensor* key,
                                  const qkv_tensor* value, const qkv_mla_plan* plan, const qkv_tensor* out,
                                  const qkv_tensor* lse, const qkv_tensor* out_scale, qkv_stream stream) {
  return guarded([&] {
    required(prefill, "prefill")
        .prefill.run_new_tokens(from_c(query, "query"), from_c(key, "key"), from_c(value, "value"),
                                required(plan, "plan").plan, from_c(out, "out"), from_c(lse, "lse"), {stream},
                                from_c(out_scale, "out_scale"));
  });
}

qkv_status qkv_mla_run_context_chunk(const qkv_mla_prefill* prefill, int32_t chunk, const qkv_tensor* query,
                                     const qkv_tensor* key, const qkv_tensor* value, const qkv_mla_plan* plan,
                                     const qkv_tensor* out, const qkv_tensor* lse, qkv_stream stream) {
  return guarded([&] {
    required(prefill, "prefill")
        .prefill.run_context_chunk(chunk, from_c(query, "query"), from_c(key, "key"), from_c(value, "value"),
                                   required(plan, "plan").plan, from_c(out, "out"), from_c(lse, "lse"), {stream});
  });
}

qkv_status qkv_mla_merge_context(const qkv_mla_prefill* prefill, const qkv_state* context, const qkv_state* new_tokens,
                                 const qkv_mla_plan* plan, const qkv_tensor* out, const qkv_tensor* out_scale,
                                 qkv_stream stream) {
  return guarded([&] {
    required(prefill, "prefill")
        .prefill.merge_context(state_from_c(context, "context"), state_from_c(new_tokens, "new_tokens"),
                               required(plan, "plan").plan, {stream}, from_c(out, "out"),
                               from_c(out_scale, "out_scale"));
  });
}

qkv_status qkv_mla_forward(const qkv_mla_prefill* prefill, const qkv_tensor* query, const qkv_tensor* new_latents,
                           const qkv_tensor* latent_cache, const qkv_mla_plan* plan, const qkv_projection* projection,
                           const qkv_tensor* workspace, qkv_collectives* ranks, const qkv_tensor* out,
                           const qkv_tensor* lse, const qkv_tensor* out_scale, const qkv_tensor* latent_scale,
                           const qkv_stream* gather_stream, qkv_stream stream) {
  return guarded([&] {
    const MlaPrefill& layer = required(prefill, "prefill").prefill;
    const MlaPlan& step = required(plan, "plan").plan;
    const Projection& project = required(projection, "projection").projection;
    const Tensor query_view = from_c(query, "query");
    const Tensor latents = from_c(new_latents, "new_latents");
    const Tensor cache = from_c(latent_cache, "latent_cache");
    const Tensor memory = from_c(workspace, "workspace");
    const Tensor result = from_c(out, "out");
    const Tensor result_lse = from_c(lse, "lse");
    const Tensor result_scale = from_c(out_scale, "out_scale");
    const Tensor cache_scale = from_c(latent_scale, "latent_scale");
    std::optional<Stream> gathers;
    if (gather_stream != nullptr) gathers = Stream{*gather_stream};
    if (ranks == nullptr) {
      layer.forward(query_view, latents, cache, step, project, memory, result, result_lse, {stream}, gathers,
                    result_scale, cache_scale);
    } else {
      layer.forward(query_view, latents, cache, step, project, memory, *ranks->ranks, result, result_lse, {stream},
                    gathers, result_scale, cache_scale);
    }
  });
}

qkv_status qkv_gather_cache(const qkv_tensor* pages, const qkv_tensor* block_table, const qkv_tensor* starts,
                            const qkv_tensor* cu_seq_lens, const qkv_tensor* rows, const qkv_tensor* scale,
                            qkv_stream stream) {
  return guarded([&] {
    gather_cache(from_c(pages, "pages"), from_c(block_table, "block_table"), from_c(starts, "starts"),
                 from_c(cu_seq_lens, "cu_seq_lens"), from_c(rows, "rows"), {stream}, from_c(scale, "scale"));
  });
}
