// MLA prefill over ranks that exchange states.
#include <nanobind/stl/shared_ptr.h>

#include "bindings.hpp"

namespace qkv::python {
namespace {

// The device is what a call's stream belongs to.
struct DeviceMlaContextParallel {
  MlaContextParallel layer;
  Device device;
};

void init(DeviceMlaContextParallel* self, const MlaSpec& spec, const std::shared_ptr<Collectives>& collectives,
          int32_t interleave_size, const std::string& exchange, const std::optional<RequestBounds>& warm_up) {
  const MlaContextParallelSpec whole{spec, interleave_size, parse_exchange(exchange)};
  if (collectives == nullptr) throw Error(ErrorCode::invalid_argument, "collectives", "None", "a qkv.Collectives");
  const Device device = collectives->device();
  nb::gil_scoped_release released;  // the other ranks may be threads of this interpreter
  new (self) DeviceMlaContextParallel{MlaContextParallel(whole, collectives, warm_up), device};
}

MlaPlan plan(const DeviceMlaContextParallel& self, const HeldBatch& batch, int32_t workspace_tokens,
             bool batch_invariant, const StreamArgument& stream) {
  const Stream on = read_stream(stream, self.device);
  ContextChunkOptions options;
  options.workspace_tokens = workspace_tokens;
  options.page_size = self.layer.spec().layer.cache.page_size;
  options.batch_invariant = batch_invariant;
  nb::gil_scoped_release released;
  return self.layer.plan(batch.batch, options, on);
}

nb::any forward(const DeviceMlaContextParallel& self, const ArrayArgument& query, const ArrayArgument& new_latents,
                const ArrayArgument& latent_cache, const MlaPlan& plan, const HeldProjection& projection,
                const ArrayArgument& workspace, const ArrayArgument& out, const ArrayArgument& lse,
                const ArrayArgument& out_scale, const ArrayArgument& latent_scale, const StreamArgument& stream,
                const StreamArgument& gather_stream) {
  const Stream on = read_stream(stream, self.device);
  const Stream gather_on = gather_stream.is_none() ? on : read_stream(gather_stream, self.device);
  const MlaSpec& spec = self.layer.spec().layer;
  const HeldTensor query_tensor = read_tensor(query, "query");
  const HeldTensor latents = read_tensor(new_latents, "new_latents");
  const HeldTensor cache = read_tensor(latent_cache, "latent_cache", if_byte(spec.latent_dtype()));
  const HeldTensor memory = write_memory(workspace, "workspace");
  nb::any result = output_or_zeros(out, query, {query_tensor.view.shape[0], self.layer.num_heads(), spec.v_head_dim},
                                   spec.out_dtype(), stream);
  const HeldTensor out_tensor = write_tensor(result, "out", if_byte(spec.out_dtype()));
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = output_scale_tensor(out_scale);
  const HeldTensor scale_of_latents = read_optional_tensor(latent_scale, "latent_scale");
  {
    nb::gil_scoped_release released;
    self.layer.forward(query_tensor.view, latents.view, cache.view, plan, projection.projection, memory.view,
                       out_tensor.view, lse_tensor.view, on, gather_on, scale.view, scale_of_latents.view);
  }
  return result;
}

}  // namespace

void bind_mla_context_parallel(nb::module_& module) {
  nb::class_<DeviceMlaContextParallel>(
      module, "MlaContextParallel",
      "MLA prefill over ranks that share the latent cache and exchange states: less than latents, where the context is "
      "long and new tokens are few. See context_parallel.md.\n\n"
      "The calls that exchange, this one and forward, are made by all ranks in the same order.")
      .def("__init__", &init, nb::arg("spec"), nb::arg("collectives"), nb::kw_only(), nb::arg("interleave_size") = 1,
           nb::arg("exchange") = "all_to_all", nb::arg("warm_up") = nb::none(),
           "spec: the layer as on one rank, with the heads of all ranks. interleave_size, exchange, warm_up: as in "
           "ContextParallel.")
      .def_prop_ro("spec", [](const DeviceMlaContextParallel& self) { return self.layer.spec().layer; })
      .def_prop_ro("shard", [](const DeviceMlaContextParallel& self) { return self.layer.shard(); })
      .def_prop_ro("num_heads", [](const DeviceMlaContextParallel& self) { return self.layer.num_heads(); })
      .def("plan", &plan, nb::arg("batch"), nb::arg("workspace_tokens"), nb::kw_only(),
           nb::arg("batch_invariant") = false, nb::arg("stream") = nb::none(),
           "batch: as in MlaPrefill, with the rank's own block_table. workspace_tokens: context tokens of a chunk at "
           "most, those of all ranks.")
      .def(
          "workspace_bytes",
          [](const DeviceMlaContextParallel& self, int64_t max_new_tokens, int64_t workspace_tokens) {
            return self.layer.workspace_bytes(max_new_tokens, workspace_tokens);
          },
          nb::arg("max_new_tokens"), nb::arg("workspace_tokens"), "Of forward, for all plans up to these maxima.")
      .def("forward", &forward, nb::arg("query"), nb::arg("new_latents"), nb::arg("latent_cache"), nb::arg("plan"),
           nb::arg("projection"), nb::arg("workspace"), nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(),
           nb::kw_only(), nb::arg("out_scale") = nb::none(), nb::arg("latent_scale") = nb::none(),
           nb::arg("stream") = nb::none(), nb::arg("gather_stream") = nb::none(),
           "Attention over all ranks' context and the new tokens. Returns out.\n\n"
           "query: [>= num_tokens, num_heads, head_dim], of this rank's heads. projection: of all ranks' heads. The "
           "others as in MlaPrefill.forward.");
  module.def(
      "rank_layers",
      [](const MlaSpec& spec, int32_t rank, int32_t num_ranks, int32_t interleave_size, const std::string& exchange) {
        return rank_layers(MlaContextParallelSpec{spec, interleave_size, parse_exchange(exchange)}, rank, num_ranks);
      },
      nb::arg("spec"), nb::arg("rank"), nb::arg("num_ranks"), nb::kw_only(), nb::arg("interleave_size") = 1,
      nb::arg("exchange") = "all_to_all", "Those of a rank of MlaContextParallel.");
}

}  // namespace qkv::python
