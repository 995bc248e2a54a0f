// Attention: create, plan, update_cache, forward. The interpreter is free while they run; on a GPU, while they launch.
#include "bindings.hpp"

namespace qkv::python {
namespace {

// The device is what a call's stream belongs to.
struct DeviceAttention {
  Attention attention;
  Device device;
};

Plan plan(const DeviceAttention& layer, const HeldBatch& batch, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  nb::gil_scoped_release released;
  return layer.attention.plan(batch.batch, on);
}

void update_cache(const DeviceAttention& layer, const ArrayArgument& key, const ArrayArgument& value,
                  const HeldCache& cache, const Plan& plan, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  const HeldCache::View view = cache.write();
  nb::gil_scoped_release released;
  layer.attention.update_cache(key_tensor.view, value_tensor.view, view.cache, plan, on);
}

// Of the layer's dtype; arrays of uint8 hold its 8-bit floats.
HeldTensor write_output(const DeviceAttention& layer, nb::handle out) {
  const DType dtype = layer.attention.spec().out_dtype();
  return size_bytes(dtype) == 1 ? write_tensor(out, "out", dtype) : write_tensor(out, "out");
}

nb::any make_output(const DeviceAttention& layer, const ArrayArgument& query, const Tensor& query_view,
                    const ArrayArgument& out, const StreamArgument& stream) {
  const LayerSpec& spec = layer.attention.spec();
  return output_or_zeros(out, query, {query_view.shape[0], spec.num_q_heads, spec.value_dim()}, spec.out_dtype(),
                         stream);
}

nb::any forward_paged(const DeviceAttention& layer, const ArrayArgument& query, const HeldCache& cache,
                      const Plan& plan, const ArrayArgument& out, const ArrayArgument& lse,
                      const ArrayArgument& out_scale, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor query_tensor = read_tensor(query, "query");
  const HeldCache::View view = cache.read();
  nb::any result = make_output(layer, query, query_tensor.view, out, stream);
  const HeldTensor out_tensor = write_output(layer, result);
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = read_optional_tensor(out_scale, "out_scale");
  {
    nb::gil_scoped_release released;
    layer.attention.forward(query_tensor.view, view.cache, plan, out_tensor.view, lse_tensor.view, on, scale.view);
  }
  return result;
}

nb::any forward_dense(const DeviceAttention& layer, const ArrayArgument& query, const ArrayArgument& key,
                      const ArrayArgument& value, const Plan& plan, const ArrayArgument& out, const ArrayArgument& lse,
                      const ArrayArgument& out_scale, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor query_tensor = read_tensor(query, "query");
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  nb::any result = make_output(layer, query, query_tensor.view, out, stream);
  const HeldTensor out_tensor = write_output(layer, result);
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = read_optional_tensor(out_scale, "out_scale");
  {
    nb::gil_scoped_release released;
    layer.attention.forward(query_tensor.view, key_tensor.view, value_tensor.view, plan, out_tensor.view,
                            lse_tensor.view, on, scale.view);
  }
  return result;
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<DeviceAttention>(
      module, "Attention",
      "A layer that can run: Attention once a layer, plan once a step, update_cache and forward.\n\n"
      "stream: a CUstream's address, or an object with cuda_stream (torch) or __cuda_stream__; None: torch's current "
      "stream on the layer's device, without torch the default stream. The CPU has none.")
      .def(
          "__init__",
          [](DeviceAttention* self, const LayerSpec& spec, const std::string& name,
             const std::optional<RequestBounds>& warm_up) {
            const Device device = parse_device(name);
            nb::gil_scoped_release released;  // kernels of several layers compile at the same time
            new (self) DeviceAttention{Attention(spec, device, warm_up), device};
          },
          nb::arg("spec"), nb::arg("device") = "cpu", nb::kw_only(), nb::arg("warm_up") = nb::none(),
          "Raises Error with all of explain()'s reasons if the layer cannot run on the device.\n\n"
          "warm_up: RequestBounds; on a GPU all kernels that requests within them can reach are compiled before it "
          "returns. None: those of further kinds of batches are compiled when a plan first needs them.")
      .def_prop_ro("spec", [](const DeviceAttention& layer) { return layer.attention.spec(); })
      .def(
          "plan", &plan, nb::arg("batch"), nb::kw_only(), nb::arg("stream") = nb::none(),
          "Checks the batch and cuts it into work items. The plan fits every Attention whose spec differs only in "
          "sinks, slopes and scales' values, and keeps nothing of the batch's arrays.\n\n"
          "On a GPU, too, the batch's arrays are host arrays; the plan is copied on the stream. Keep it until the work "
          "that uses it has run.")
      .def("update_cache", &update_cache, nb::arg("key"), nb::arg("value"), nb::arg("cache"), nb::arg("plan"),
           nb::kw_only(), nb::arg("stream") = nb::none(),
           "Writes key and value of the new tokens to the slots of the plan's slot_mapping.\n\n"
           "key: [>= num_slots, num_kv_heads, head_dim], value: [>= num_slots, num_kv_heads, head_dim_v]; float32, "
           "float16 or bfloat16. Further rows are ignored.")
      .def("forward", &forward_paged, nb::arg("query"), nb::arg("cache"), nb::arg("plan"), nb::arg("out") = nb::none(),
           nb::arg("lse") = nb::none(), nb::kw_only(), nb::arg("out_scale") = nb::none(),
           nb::arg("stream") = nb::none(),
           "Attention over a paged cache. Returns out.\n\n"
           "query: query_dtype [>= num_tokens, num_q_heads, head_dim].\n"
           "out: output_dtype [>= num_tokens, num_q_heads, head_dim_v]; None makes one of the query's kind and rows.\n"
           "lse: float32 [num_q_heads, >= num_tokens], written if given: natural log of the sum of exp of the scores, "
           "sink included.\n"
           "out_scale: float32 [1], for outputs of 8-bit floats and no others: they are the results divided by it.\n"
           "Rows without a visible key: out = 0, lse = -inf (the sink, if there is one).")
      .def("forward", &forward_dense, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("plan"),
           nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(), nb::kw_only(), nb::arg("out_scale") = nb::none(),
           nb::arg("stream") = nb::none(),
           "Attention over dense keys and values, for layers without a cache. Returns out.\n\n"
           "key: kv_dtype [sum of seq_lens, num_kv_heads, head_dim]; value likewise with head_dim_v.");
}

}  // namespace qkv::python
