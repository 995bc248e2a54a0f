// Context parallelism: a layer whose cache several ranks share.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "qkv/context_parallel.hpp"

namespace qkv::python {

StateExchange parse_exchange(const std::string& name) {
  for (const StateExchange exchange :
       {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather}) {
    if (name == to_string(exchange)) return exchange;
  }
  throw Error(ErrorCode::invalid_argument, "exchange", "\"" + name + "\"",
              "\"all_to_all\", \"reduce_scatter\" or \"all_gather\"");
}

namespace {

// The device is what a call's stream belongs to.
struct DeviceContextParallel {
  ContextParallel layer;
  Device device;
};

void init(DeviceContextParallel* self, const LayerSpec& spec, const std::shared_ptr<Collectives>& collectives,
          int32_t interleave_size, const std::string& exchange, const std::optional<RequestBounds>& warm_up) {
  const ContextParallelSpec whole{spec, interleave_size, parse_exchange(exchange)};
  if (collectives == nullptr) throw Error(ErrorCode::invalid_argument, "collectives", "None", "a qkv.Collectives");
  const Device device = collectives->device();
  nb::gil_scoped_release released;  // the other ranks may be threads of this interpreter
  new (self) DeviceContextParallel{ContextParallel(whole, collectives, warm_up), device};
}

ContextParallelPlan plan(const DeviceContextParallel& self, const HeldBatch& batch, const StreamArgument& stream) {
  const Stream on = read_stream(stream, self.device);
  nb::gil_scoped_release released;
  return self.layer.plan(batch.batch, on);
}

void update_cache(const DeviceContextParallel& self, const ArrayArgument& key, const ArrayArgument& value,
                  const HeldCache& cache, const ContextParallelPlan& plan, const StreamArgument& stream) {
  const Stream on = read_stream(stream, self.device);
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  const HeldCache::View view = cache.write();
  nb::gil_scoped_release released;
  self.layer.update_cache(key_tensor.view, value_tensor.view, view.cache, plan, on);
}

nb::any forward(const DeviceContextParallel& self, const ArrayArgument& query, const ArrayArgument& key,
                const ArrayArgument& value, const HeldCache& cache, const ContextParallelPlan& plan,
                const ArrayArgument& workspace, const ArrayArgument& out, const ArrayArgument& lse,
                const ArrayArgument& out_scale, const StreamArgument& stream) {
  const Stream on = read_stream(stream, self.device);
  const LayerSpec& spec = self.layer.spec().layer;
  const HeldTensor query_tensor = read_tensor(query, "query");
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  const HeldCache::View view = cache.read();
  nb::any result = output_or_zeros(out, query, {query_tensor.view.shape[0], self.layer.num_heads(), spec.value_dim()},
                                   spec.out_dtype(), stream);
  const bool is_byte = size_bytes(spec.out_dtype()) == 1;
  const HeldTensor out_tensor = is_byte ? write_tensor(result, "out", spec.out_dtype()) : write_tensor(result, "out");
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = output_scale_tensor(out_scale);
  nb::any memory = output_or_zeros(workspace, query, {(plan.workspace_bytes() + 3) / 4}, DType::f32, stream);
  const HeldTensor memory_tensor = write_memory(memory, "workspace");
  {
    nb::gil_scoped_release released;
    self.layer.forward(query_tensor.view, key_tensor.view, value_tensor.view, view.cache, plan, memory_tensor.view,
                       out_tensor.view, lse_tensor.view, on, scale.view);
  }
  return result;
}

}  // namespace

void bind_context_parallel(nb::module_& module) {
  nb::class_<ContextParallelPlan>(module, "ContextParallelPlan")
      .def_prop_ro("exchanges", &ContextParallelPlan::exchanges,
                   "False where no request has a context: then forward exchanges nothing. The same on every rank.")
      .def_prop_ro("workspace_bytes", &ContextParallelPlan::workspace_bytes);
  nb::class_<DeviceContextParallel>(
      module, "ContextParallel",
      "A layer over several ranks, each of which keeps some tokens of every request: see context_parallel.md.\n\n"
      "Batches are the same on every rank but for block_table, the rank's own pages, and slot_mapping (shard_slots). "
      "The calls that exchange, this one and forward, are made by all ranks in the same order.")
      .def(
          "__init__", &init, nb::arg("spec"), nb::arg("collectives"), nb::kw_only(), nb::arg("interleave_size") = 1,
          nb::arg("exchange") = "all_to_all", nb::arg("warm_up") = nb::none(),
          "spec: the layer as on one rank, with the heads of all ranks.\n"
          "interleave_size: tokens in a row that one rank keeps; divides the page size.\n"
          "exchange: \"all_to_all\" or \"reduce_scatter\", where each rank has heads of its own; \"all_gather\", where "
          "every rank has all queries and gets all results.\n"
          "warm_up: as in Attention.")
      .def_prop_ro("spec", [](const DeviceContextParallel& self) { return self.layer.spec().layer; })
      .def_prop_ro("shard", [](const DeviceContextParallel& self) { return self.layer.shard(); })
      .def_prop_ro("num_heads", [](const DeviceContextParallel& self) { return self.layer.num_heads(); })
      .def("plan", &plan, nb::arg("batch"), nb::kw_only(), nb::arg("stream") = nb::none())
      .def(
          "workspace_bytes",
          [](const DeviceContextParallel& self, int64_t max_tokens) { return self.layer.workspace_bytes(max_tokens); },
          nb::arg("max_tokens"), "Of forward, for plans of at most so many new tokens.")
      .def("update_cache", &update_cache, nb::arg("key"), nb::arg("value"), nb::arg("cache"), nb::arg("plan"),
           nb::kw_only(), nb::arg("stream") = nb::none(),
           "Writes the new tokens that this rank keeps; before or after forward.")
      .def("forward", &forward, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("cache"), nb::arg("plan"),
           nb::arg("workspace") = nb::none(), nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(), nb::kw_only(),
           nb::arg("out_scale") = nb::none(), nb::arg("stream") = nb::none(),
           "Attention over all ranks' keys. Returns out.\n\n"
           "query: [>= num_tokens, num_heads, head_dim], of this rank's heads; key, value: [>= num_tokens, "
           "num_kv_heads, ...], the new tokens', of the query's dtype.\n"
           "workspace: contiguous memory of plan.workspace_bytes; None makes some for this call.");
  module.def(
      "rank_layers",
      [](const LayerSpec& spec, int32_t rank, int32_t num_ranks, int32_t interleave_size, const std::string& exchange) {
        return rank_layers(ContextParallelSpec{spec, interleave_size, parse_exchange(exchange)}, rank, num_ranks);
      },
      nb::arg("spec"), nb::arg("rank"), nb::arg("num_ranks"), nb::kw_only(), nb::arg("interleave_size") = 1,
      nb::arg("exchange") = "all_to_all",
      "The layers that a rank of ContextParallel runs, for warmup(): neither the ranks nor a GPU need be there.");
}

}  // namespace qkv::python
