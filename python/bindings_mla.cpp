// MLA prefill: chunks of latent context, the steps and the whole.
#include <fmt/format.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>

#include "bindings.hpp"

namespace qkv::python {
namespace {

void init_spec(MlaSpec* self, int32_t num_heads, int32_t qk_nope_head_dim, int32_t qk_rope_head_dim, int32_t v_head_dim,
               int32_t kv_lora_rank, const std::string& dtype, const std::optional<std::string>& output_dtype,
               const CacheSpec& cache, const std::optional<MaskArgument>& mask, std::optional<float> scale,
               float softcap, const std::vector<float>& sinks, const std::string& output_scales,
               const std::optional<std::string>& cache_dtype) {
  MlaSpec spec;
  spec.num_heads = num_heads;
  spec.qk_nope_head_dim = qk_nope_head_dim;
  spec.qk_rope_head_dim = qk_rope_head_dim;
  spec.v_head_dim = v_head_dim;
  spec.kv_lora_rank = kv_lora_rank;
  spec.dtype = parse_dtype(dtype, "dtype");
  if (output_dtype) spec.output_dtype = parse_dtype(*output_dtype, "output_dtype");
  spec.output_scales = parse_output_scales(output_scales);
  if (cache_dtype) spec.cache_dtype = parse_dtype(*cache_dtype, "cache_dtype");
  spec.cache = cache;
  if (mask) spec.mask = to_mask(*mask);
  spec.scale = scale;
  spec.softcap = softcap;
  spec.sinks = sinks;
  new (self) MlaSpec(std::move(spec));
}

HeldProjection make_projection(const MlaSpec& spec, const ArrayArgument& kv_b_proj) {
  HeldTensor matrix = read_tensor(kv_b_proj, "kv_b_proj");
  Projection projection = matrix_projection(spec, matrix.view);
  return {std::move(projection), std::move(matrix)};
}

// The device is what a call's stream belongs to.
struct DeviceMla {
  MlaPrefill prefill;
  Device device;
};

ContextChunkOptions make_options(int32_t workspace_tokens, int32_t page_size, int32_t num_ranks,
                                 int32_t interleave_size, bool batch_invariant, int32_t rank = 0) {
  ContextChunkOptions options;
  options.rank = rank;
  options.workspace_tokens = workspace_tokens;
  options.page_size = page_size;
  options.num_ranks = num_ranks;
  options.interleave_size = interleave_size;
  options.batch_invariant = batch_invariant;
  return options;
}

MlaPlan plan(const DeviceMla& layer, const HeldBatch& batch, int32_t workspace_tokens, int32_t num_ranks,
             int32_t interleave_size, int32_t rank, bool batch_invariant, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const ContextChunkOptions options = make_options(workspace_tokens, layer.prefill.spec().cache.page_size, num_ranks,
                                                   interleave_size, batch_invariant, rank);
  nb::gil_scoped_release released;
  return layer.prefill.plan(batch.batch, options, on);
}

nb::any make_output(const DeviceMla& layer, const ArrayArgument& query, int64_t rows, DType dtype,
                    const ArrayArgument& out, const StreamArgument& stream) {
  const MlaSpec& spec = layer.prefill.spec();
  return output_or_zeros(out, query, {rows, spec.num_heads, spec.v_head_dim}, dtype, stream);
}

nb::any run_new_tokens(const DeviceMla& layer, const ArrayArgument& query, const ArrayArgument& key,
                       const ArrayArgument& value, const MlaPlan& plan, const ArrayArgument& out,
                       const ArrayArgument& lse, const ArrayArgument& out_scale, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor query_tensor = read_tensor(query, "query");
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  const DType out_dtype = layer.prefill.spec().out_dtype();
  const DType dtype = size_bytes(out_dtype) == 1 && !plan.chunks().empty() ? DType::f32 : out_dtype;
  nb::any result = make_output(layer, query, query_tensor.view.shape[0], dtype, out, stream);
  const HeldTensor out_tensor = write_tensor(result, "out", if_byte(dtype));
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = output_scale_tensor(out_scale);
  {
    nb::gil_scoped_release released;
    layer.prefill.run_new_tokens(query_tensor.view, key_tensor.view, value_tensor.view, plan, out_tensor.view,
                                 lse_tensor.view, on, scale.view);
  }
  return result;
}

void run_context_chunk(const DeviceMla& layer, int32_t chunk, const ArrayArgument& query, const ArrayArgument& key,
                       const ArrayArgument& value, const MlaPlan& plan, const ArrayArgument& out,
                       const ArrayArgument& lse, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor query_tensor = read_tensor(query, "query");
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  const HeldTensor out_tensor = write_tensor(out, "out");
  const HeldTensor lse_tensor = write_tensor(lse, "lse");
  nb::gil_scoped_release released;
  layer.prefill.run_context_chunk(chunk, query_tensor.view, key_tensor.view, value_tensor.view, plan, out_tensor.view,
                                  lse_tensor.view, on);
}

using StateArgument = std::pair<ArrayArgument, ArrayArgument>;

void merge_context(const DeviceMla& layer, const StateArgument& context, const StateArgument& new_tokens,
                   const MlaPlan& plan, const ArrayArgument& out, const ArrayArgument& out_scale,
                   const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor context_out = read_tensor(context.first, "context.out");
  const HeldTensor context_lse = read_tensor(context.second, "context.lse");
  const HeldTensor new_out = write_tensor(new_tokens.first, "new_tokens.out");
  const HeldTensor new_lse = write_tensor(new_tokens.second, "new_tokens.lse");
  const HeldTensor result =
      out.is_none() ? HeldTensor{} : write_tensor(out, "out", if_byte(layer.prefill.spec().out_dtype()));
  const HeldTensor scale = output_scale_tensor(out_scale);
  nb::gil_scoped_release released;
  layer.prefill.merge_context({context_out.view, context_lse.view}, {new_out.view, new_lse.view}, plan, on, result.view,
                              scale.view);
}

nb::any forward(const DeviceMla& layer, const ArrayArgument& query, const ArrayArgument& new_latents,
                const ArrayArgument& latent_cache, const MlaPlan& plan, const HeldProjection& projection,
                const ArrayArgument& workspace, const ArrayArgument& out, const ArrayArgument& lse,
                const ArrayArgument& out_scale, const ArrayArgument& latent_scale,
                const std::shared_ptr<Collectives>& collectives, const StreamArgument& stream,
                const StreamArgument& gather_stream) {
  const Stream on = read_stream(stream, layer.device);
  const Stream gather_on = gather_stream.is_none() ? on : read_stream(gather_stream, layer.device);
  const HeldTensor query_tensor = read_tensor(query, "query");
  const HeldTensor latents = read_tensor(new_latents, "new_latents");
  const MlaSpec& spec = layer.prefill.spec();
  const HeldTensor cache = read_tensor(latent_cache, "latent_cache", if_byte(spec.latent_dtype()));
  const HeldTensor memory = write_memory(workspace, "workspace");
  nb::any result = make_output(layer, query, query_tensor.view.shape[0], spec.out_dtype(), out, stream);
  const HeldTensor out_tensor = write_tensor(result, "out", if_byte(spec.out_dtype()));
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = output_scale_tensor(out_scale);
  const HeldTensor scale_of_latents = read_optional_tensor(latent_scale, "latent_scale");
  {
    nb::gil_scoped_release released;
    if (collectives) {
      layer.prefill.forward(query_tensor.view, latents.view, cache.view, plan, projection.projection, memory.view,
                            *collectives, out_tensor.view, lse_tensor.view, on, gather_on, scale.view,
                            scale_of_latents.view);
    } else {
      layer.prefill.forward(query_tensor.view, latents.view, cache.view, plan, projection.projection, memory.view,
                            out_tensor.view, lse_tensor.view, on, gather_on, scale.view, scale_of_latents.view);
    }
  }
  return result;
}

std::pair<int32_t, int32_t> to_pair(const TokenRange& range) { return {range.begin, range.end}; }

std::vector<std::pair<int32_t, int32_t>> to_pairs(const std::vector<TokenRange>& ranges) {
  std::vector<std::pair<int32_t, int32_t>> pairs;
  for (const TokenRange& range : ranges) pairs.push_back(to_pair(range));
  return pairs;
}

using NumpyInts = nb::ndarray<nb::numpy, int32_t>;

// An int32 numpy array of its own.
template <std::vector<int32_t> ContextChunk::*kField>
NumpyInts array_of(const ContextChunk& chunk) {
  auto* owned = new std::vector<int32_t>(chunk.*kField);
  const nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<int32_t>*>(pointer); });
  return NumpyInts(owned->data(), {owned->size()}, owner);
}

void bind_chunks(nb::module_& module) {
  nb::class_<ContextChunk>(module, "ContextChunk",
                           "The context of consecutive requests, or of a part of the first and the last of them. "
                           "Arrays are int32, with an entry a request of the chunk.")
      .def_ro("index", &ContextChunk::index)
      .def_prop_ro(
          "requests", [](const ContextChunk& chunk) { return std::pair(chunk.request_begin, chunk.request_end); },
          "(begin, end) in the batch.")
      .def_prop_ro(
          "tokens", [](const ContextChunk& chunk) { return to_pair(chunk.tokens); },
          "(begin, end) of the requests' new tokens in the batch.")
      .def_ro("is_continuation", &ContextChunk::is_continuation,
              "The chunk before holds earlier context of the first request.")
      .def_ro("continuation_token_end", &ContextChunk::continuation_token_end,
              "Where the first request's new tokens end in the batch; 0 if it continues nothing.")
      .def_ro("num_context_tokens", &ContextChunk::num_context_tokens)
      .def_ro("max_query_len", &ContextChunk::max_query_len)
      .def_ro("max_seq_len", &ContextChunk::max_seq_len)
      .def_prop_ro("query_start_loc", &array_of<&ContextChunk::query_start_loc>, nb::rv_policy::automatic)
      .def_prop_ro("cu_seq_lens", &array_of<&ContextChunk::cu_seq_lens>, nb::rv_policy::automatic)
      .def_prop_ro("starts", &array_of<&ContextChunk::starts>, nb::rv_policy::automatic)
      .def_prop_ro("seq_lens", &array_of<&ContextChunk::seq_lens>, nb::rv_policy::automatic)
      .def_prop_ro("token_to_seq", &array_of<&ContextChunk::token_to_seq>, nb::rv_policy::automatic)
      .def_prop_ro("local_seq_lens", &array_of<&ContextChunk::local_seq_lens>, nb::rv_policy::automatic,
                   "[num_requests * num_ranks].")
      .def_prop_ro("padded_local_seq_lens", &array_of<&ContextChunk::padded_local_seq_lens>, nb::rv_policy::automatic)
      .def_prop_ro("padded_local_cu_seq_lens", &array_of<&ContextChunk::padded_local_cu_seq_lens>,
                   nb::rv_policy::automatic)
      .def_prop_ro("local_starts", &array_of<&ContextChunk::local_starts>, nb::rv_policy::automatic)
      .def_prop_ro("all_gathered_rows", &array_of<&ContextChunk::all_gathered_rows>, nb::rv_policy::automatic);

  module.def(
      "plan_context_chunks",
      [](const std::vector<int32_t>& query_start_loc, const std::vector<int32_t>& context_lens,
         int32_t workspace_tokens, int32_t page_size, int32_t num_ranks, int32_t interleave_size,
         bool batch_invariant) {
        return plan_context_chunks(
                   query_start_loc, context_lens,
                   make_options(workspace_tokens, page_size, num_ranks, interleave_size, batch_invariant))
            .chunks;
      },
      nb::arg("query_start_loc"), nb::arg("context_lens"), nb::kw_only(), nb::arg("workspace_tokens"),
      nb::arg("page_size") = 16, nb::arg("num_ranks") = 1, nb::arg("interleave_size") = 1,
      nb::arg("batch_invariant") = false,
      "Packs cached contexts in order into chunks of at most workspace_tokens. Lengths are lists of int.\n\n"
      "num_ranks, interleave_size: ranks that share the cache. batch_invariant: where a request is cut depends on its "
      "own length only.");
  module.def(
      "default_workspace_tokens",
      [](int64_t max_model_len, int64_t max_num_requests, int32_t page_size, int32_t num_ranks,
         int32_t interleave_size) {
        return default_workspace_tokens(make_options(0, page_size, num_ranks, interleave_size, false), max_model_len,
                                        max_num_requests);
      },
      nb::arg("max_model_len"), nb::arg("max_num_requests"), nb::kw_only(), nb::arg("page_size") = 16,
      nb::arg("num_ranks") = 1, nb::arg("interleave_size") = 1, "A workspace for a server's limits, in tokens.");
}

}  // namespace

void bind_mla(nb::module_& module) {
  nb::class_<MlaSpec>(
      module, "MlaSpec",
      "A layer of multi-head latent attention.\n\n"
      "kv_lora_rank: columns of a latent; its row in the cache ends with the rotary part of the key.\n"
      "dtype: of queries, keys, values and new latents. output_dtype, cache_dtype: 8-bit floats as well, "
      "caches also \"i8\"; None means dtype.\n"
      "output_scales: as in LayerSpec.\n"
      "mask: over absolute positions; None means causal. softcap, sinks, scale: as in LayerSpec.")
      .def("__init__", &init_spec, nb::kw_only(), nb::arg("num_heads"), nb::arg("qk_nope_head_dim"),
           nb::arg("qk_rope_head_dim") = 0, nb::arg("v_head_dim"), nb::arg("kv_lora_rank"), nb::arg("dtype") = "bf16",
           nb::arg("output_dtype") = nb::none(), nb::arg("cache") = CacheSpec{}, nb::arg("mask") = nb::none(),
           nb::arg("scale") = nb::none(), nb::arg("softcap") = 0.0f, nb::arg("sinks") = nb::tuple(),
           nb::arg("output_scales") = "per_tensor", nb::arg("cache_dtype") = nb::none())
      .def_ro("num_heads", &MlaSpec::num_heads)
      .def_ro("qk_nope_head_dim", &MlaSpec::qk_nope_head_dim)
      .def_ro("qk_rope_head_dim", &MlaSpec::qk_rope_head_dim)
      .def_ro("v_head_dim", &MlaSpec::v_head_dim)
      .def_ro("kv_lora_rank", &MlaSpec::kv_lora_rank)
      .def_prop_ro("head_dim", &MlaSpec::head_dim)
      .def_prop_ro("latent_dim", &MlaSpec::latent_dim)
      .def_prop_ro("dtype", [](const MlaSpec& spec) { return std::string(to_string(spec.dtype)); })
      .def_prop_ro("output_dtype", [](const MlaSpec& spec) { return std::string(to_string(spec.out_dtype())); })
      .def_prop_ro("output_scales", [](const MlaSpec& spec) { return std::string(to_string(spec.output_scales)); })
      .def_prop_ro("cache_dtype", [](const MlaSpec& spec) { return std::string(to_string(spec.latent_dtype())); })
      .def_ro("cache", &MlaSpec::cache)
      .def("__repr__", [](const MlaSpec& spec) {
        return fmt::format(
            "MlaSpec(num_heads={}, qk_nope_head_dim={}, qk_rope_head_dim={}, v_head_dim={}, "
            "kv_lora_rank={}, dtype='{}', page_size={})",
            spec.num_heads, spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim, spec.kv_lora_rank,
            to_string(spec.dtype), spec.cache.page_size);
      });
  module.def(
      "explain", [](const MlaSpec& spec, const std::string& device) { return explain(spec, parse_device(device)); },
      nb::arg("spec"), nb::arg("device") = "cpu");
  bind_chunks(module);

  nb::class_<HeldProjection>(module, "Projection", "Fills keys and values from latents. Keeps its matrix alive.");
  module.def("matrix_projection", &make_projection, nb::arg("spec"), nb::arg("kv_b_proj"),
             "The projection by a matrix.\n\n"
             "kv_b_proj: dtype [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], a head's key rows before "
             "its value rows.");

  nb::class_<MlaPlan>(module, "MlaPlan", "A step's chunks and the plans of their attention.")
      .def_prop_ro("num_tokens", &MlaPlan::num_tokens)
      .def_prop_ro("chunks", &MlaPlan::chunks, nb::rv_policy::copy)
      .def_prop_ro("empty_token_slices", [](const MlaPlan& plan) { return to_pairs(plan.empty_token_slices()); })
      .def_prop_ro("workspace_bytes", &MlaPlan::workspace_bytes, "Of forward, for this plan.");

  nb::class_<DeviceMla>(
      module, "MlaPrefill",
      "Prefill over a latent cache: MlaPrefill once a layer, plan once a step, forward each layer.\n\n"
      "stream: as in Attention.")
      .def(
          "__init__",
          [](DeviceMla* self, const MlaSpec& spec, const std::string& name,
             const std::optional<RequestBounds>& warm_up) {
            const Device device = parse_device(name);
            const nb::gil_scoped_release released;
            new (self) DeviceMla{MlaPrefill(spec, device, warm_up), device};
          },
          nb::arg("spec"), nb::arg("device") = "cpu", nb::kw_only(), nb::arg("warm_up") = nb::none(),
          "Raises Error with all of explain()'s reasons if the layer cannot run on the device.\n\n"
          "warm_up: RequestBounds, as in Attention.")
      .def_prop_ro("spec", [](const DeviceMla& layer) { return layer.prefill.spec(); })
      .def_static(
          "supports_dimensions",
          [](int32_t nope, int32_t rope, int32_t v, const std::string& device) {
            return MlaPrefill::supports_dimensions(nope, rope, v, parse_device(device));
          },
          nb::arg("qk_nope_head_dim"), nb::arg("qk_rope_head_dim"), nb::arg("v_head_dim"), nb::arg("device") = "cpu")
      .def_static(
          "supports_out", [] { return MlaPrefill::supports_out(); },
          "True: results are written where the caller wants them.")
      .def(
          "clone", [](const DeviceMla& layer) { return layer; }, "For another micro-batch; shares the kernels.")
      .def(
          "workspace_bytes",
          [](const DeviceMla& layer, int64_t max_new_tokens, int64_t workspace_tokens, int32_t num_ranks) {
            return layer.prefill.workspace_bytes(max_new_tokens, workspace_tokens, num_ranks);
          },
          nb::arg("max_new_tokens"), nb::arg("workspace_tokens"), nb::kw_only(), nb::arg("num_ranks") = 1,
          "Of forward, for all plans up to these maxima.")
      .def("plan", &plan, nb::arg("batch"), nb::arg("workspace_tokens"), nb::kw_only(), nb::arg("num_ranks") = 1,
           nb::arg("interleave_size") = 1, nb::arg("rank") = 0, nb::arg("batch_invariant") = false,
           nb::arg("stream") = nb::none(),
           "batch: as of any layer, without slot_mapping; seq_lens counts context and new tokens; block_table, of this "
           "rank's pages, is needed by forward only. Arrays are host arrays.\n"
           "workspace_tokens: context tokens of a chunk at most.")
      .def("run_new_tokens", &run_new_tokens, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("plan"),
           nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(), nb::kw_only(), nb::arg("out_scale") = nb::none(),
           nb::arg("stream") = nb::none(),
           "Attention of the new tokens to each other, sinks included. Returns out.\n\n"
           "Outputs of 8-bit floats: where the plan has chunks, this is a state of float32; else the result, with its "
           "out_scale.")
      .def("run_context_chunk", &run_context_chunk, nb::arg("chunk"), nb::arg("query"), nb::arg("key"),
           nb::arg("value"), nb::arg("plan"), nb::arg("out"), nb::arg("lse"), nb::kw_only(),
           nb::arg("stream") = nb::none(),
           "Attention of a chunk's queries to its context: float32 out [tokens of the chunk, num_heads, v_head_dim] "
           "and lse [num_heads, tokens of the chunk].")
      .def("merge_context", &merge_context, nb::arg("context"), nb::arg("new_tokens"), nb::arg("plan"), nb::kw_only(),
           nb::arg("out") = nb::none(), nb::arg("out_scale") = nb::none(), nb::arg("stream") = nb::none(),
           "Joins (out, lse) over all context into (out, lse) of the new tokens, in place. Rows without context are "
           "not touched.\n\n"
           "out, out_scale: for outputs of 8-bit floats, where the result of all rows goes.")
      .def("forward", &forward, nb::arg("query"), nb::arg("new_latents"), nb::arg("latent_cache"), nb::arg("plan"),
           nb::arg("projection"), nb::arg("workspace"), nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(),
           nb::kw_only(), nb::arg("out_scale") = nb::none(), nb::arg("latent_scale") = nb::none(),
           nb::arg("collectives") = nb::none(), nb::arg("stream") = nb::none(), nb::arg("gather_stream") = nb::none(),
           "Gathers, projects and attends to each chunk, then to the new tokens, and joins the states. Returns out.\n\n"
           "query: [>= num_tokens, num_heads, head_dim]. new_latents: [>= num_tokens, latent_dim].\n"
           "latent_cache: [num_pages, page_size, latent_dim].\n"
           "out_scale: as in Attention. latent_scale: float32 [1], what the elements of an 8-bit latent_cache are "
           "multiplied by.\n"
           "workspace: contiguous memory of any dtype, at least plan.workspace_bytes bytes.\n"
           "collectives: with a plan for several ranks, which share the cache; all of them make the call.\n"
           "gather_stream: where chunks are gathered, each while the one before it computes; None: on stream.");
}

}  // namespace qkv::python
