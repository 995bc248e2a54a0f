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

// The device is what a call's stream belongs to.
struct DevicePlanner {
  Planner planner;
  Device device;
};

PlanLimits limits_of(int32_t max_requests, int64_t max_tokens, int32_t max_query_len, int32_t max_seq_len,
                     int64_t max_keys, int32_t num_pages, bool plans_on_device) {
  return {max_requests, max_tokens, max_query_len, max_seq_len, max_keys, num_pages, plans_on_device};
}

template <class... Limits>
DevicePlanner planner(const DeviceAttention& layer, Limits... limits) {
  return {layer.attention.planner(limits_of(limits...)), layer.device};
}

template <class... Limits>
int64_t workspace_bytes(const DeviceAttention& layer, Limits... limits) {
  return layer.attention.workspace_bytes(limits_of(limits...));
}

Plan plan_next(DevicePlanner& planner, const HeldBatch& batch, const StreamArgument& stream) {
  const Stream on = read_stream(stream, planner.device);
  nb::gil_scoped_release released;
  return planner.planner.plan(batch.batch, on);
}

Plan update_block_table(DevicePlanner& planner, const ArrayArgument& block_table, const ArrayArgument& slot_mapping,
                        const StreamArgument& stream) {
  const Stream on = read_stream(stream, planner.device);
  const HeldTensor table = read_tensor(block_table, "block_table");
  const HeldTensor slots = read_optional_tensor(slot_mapping, "slot_mapping");
  nb::gil_scoped_release released;
  return planner.planner.update_block_table(table.view, slots.view, on);
}

void bind_planner(nb::module_& module) {
  nb::class_<DevicePlanner>(module, "Planner",
                            "Plans in memory that is made once, for steps that are captured in a CUDA graph: capture "
                            "update_cache and forward with any plan of it, then call plan and replay. Tensors handed "
                            "over with its plans have the rows of the largest batch. One thread at a time.")
      .def("plan", &plan_next, nb::arg("batch"), nb::kw_only(), nb::arg("stream") = nb::none(),
           "Brings the batch into the planner's memory, in place of the batch before, whose plan is refused from now "
           "on. "
           "On a GPU it allocates nothing and waits for nothing. Not on a stream that is being captured.")
      .def(
          "check",
          [](const DevicePlanner& planner, const StreamArgument& stream) {
            const Stream on = read_stream(stream, planner.device);
            nb::gil_scoped_release released;
            planner.planner.check(on);
          },
          nb::kw_only(), nb::arg("stream") = nb::none(),
          "Waits, and raises Error if the batch that was last planned on the device exceeded the limits.")
      .def("update_block_table", &update_block_table, nb::arg("block_table"), nb::arg("slot_mapping") = nb::none(),
           nb::kw_only(), nb::arg("stream") = nb::none(),
           "The newest batch on other pages and slots, without cutting its work again.");
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

// Of the layer's dtype; arrays of uint8 hold its 8-bit floats.
HeldTensor read_query(const DeviceAttention& layer, nb::handle query) {
  const DType dtype = layer.attention.spec().query_dtype;
  return size_bytes(dtype) == 1 ? read_tensor(query, "query", dtype) : read_tensor(query, "query");
}

// Likewise.
HeldTensor read_dense(const DeviceAttention& layer, nb::handle tensor, const char* name) {
  const DType dtype = layer.attention.spec().kv_dtype;
  return size_bytes(dtype) == 1 ? read_tensor(tensor, name, dtype) : read_tensor(tensor, name);
}

nb::any make_output(const DeviceAttention& layer, const ArrayArgument& query, const Tensor& query_view,
                    const ArrayArgument& out, const StreamArgument& stream) {
  const LayerSpec& spec = layer.attention.spec();
  return output_or_zeros(out, query, {query_view.shape[0], spec.num_q_heads, spec.value_dim()}, spec.out_dtype(),
                         stream);
}

nb::any forward_paged(const DeviceAttention& layer, const ArrayArgument& query, const HeldCache& cache,
                      const Plan& plan, const ArrayArgument& out, const ArrayArgument& lse,
                      const ArrayArgument& out_scale, const ArrayArgument& query_scale, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor query_tensor = read_query(layer, query);
  const HeldCache::View view = cache.read();
  nb::any result = make_output(layer, query, query_tensor.view, out, stream);
  const HeldTensor out_tensor = write_output(layer, result);
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = output_scale_tensor(out_scale);
  const HeldTensor scale_of_query = read_optional_tensor(query_scale, "query_scale");
  {
    nb::gil_scoped_release released;
    layer.attention.forward(query_tensor.view, view.cache, plan, out_tensor.view, lse_tensor.view, on, scale.view,
                            scale_of_query.view);
  }
  return result;
}

nb::any forward_dense(const DeviceAttention& layer, const ArrayArgument& query, const ArrayArgument& key,
                      const ArrayArgument& value, const Plan& plan, const ArrayArgument& out, const ArrayArgument& lse,
                      const ArrayArgument& out_scale, const ArrayArgument& query_scale, const ArrayArgument& key_scale,
                      const ArrayArgument& value_scale, const StreamArgument& stream) {
  const Stream on = read_stream(stream, layer.device);
  const HeldTensor query_tensor = read_query(layer, query);
  const HeldTensor key_tensor = read_dense(layer, key, "key");
  const HeldTensor value_tensor = read_dense(layer, value, "value");
  nb::any result = make_output(layer, query, query_tensor.view, out, stream);
  const HeldTensor out_tensor = write_output(layer, result);
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = output_scale_tensor(out_scale);
  const HeldTensor scale_of_query = read_optional_tensor(query_scale, "query_scale");
  const HeldTensor scale_of_key = read_optional_tensor(key_scale, "key_scale");
  const HeldTensor scale_of_value = read_optional_tensor(value_scale, "value_scale");
  {
    nb::gil_scoped_release released;
    layer.attention.forward(query_tensor.view, key_tensor.view, value_tensor.view, plan, out_tensor.view,
                            lse_tensor.view, on, scale.view, scale_of_query.view, scale_of_key.view,
                            scale_of_value.view);
  }
  return result;
}

}  // namespace

void bind_attention(nb::module_& module) {
  bind_planner(module);
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
          "scale, softcap, slopes and sinks, and keeps nothing of the batch's arrays.\n\n"
          "On a GPU, too, the batch's arrays are host arrays; the plan is copied on the stream. Keep it until the work "
          "that uses it has run.")
      .def("planner", &planner<int32_t, int64_t, int32_t, int32_t, int64_t, int32_t, bool>, nb::kw_only(),
           nb::arg("max_requests"), nb::arg("max_tokens"), nb::arg("max_query_len") = 0, nb::arg("max_seq_len"),
           nb::arg("max_keys") = 0, nb::arg("num_pages") = 0, nb::arg("plans_on_device") = false,
           "A Planner for all batches within these limits.\n\n"
           "max_requests: padding included. max_tokens: new tokens of a batch. max_query_len: new tokens of a request; "
           "0 "
           "= max_tokens. max_seq_len: keys of a request. max_keys: keys of a batch; 0 = max_requests * max_seq_len. "
           "num_pages: of the cache, for layers with one. plans_on_device: batches may be arrays of the GPU, which "
           "kernels "
           "read; see plans.md.")
      .def("workspace_bytes", &workspace_bytes<int32_t, int64_t, int32_t, int32_t, int64_t, int32_t, bool>,
           nb::kw_only(), nb::arg("max_requests"), nb::arg("max_tokens"), nb::arg("max_query_len") = 0,
           nb::arg("max_seq_len"), nb::arg("max_keys") = 0, nb::arg("num_pages") = 0,
           nb::arg("plans_on_device") = false,
           "Bytes of partial states that a planner with these limits keeps on the device.")
      .def("update_cache", &update_cache, nb::arg("key"), nb::arg("value"), nb::arg("cache"), nb::arg("plan"),
           nb::kw_only(), nb::arg("stream") = nb::none(),
           "Writes key and value of the new tokens to the slots of the plan's slot_mapping.\n\n"
           "key: [>= num_slots, num_kv_heads, head_dim], value: [>= num_slots, num_kv_heads, head_dim_v]; float32, "
           "float16 or bfloat16. Further rows are ignored.")
      .def(
          "forward", &forward_paged, nb::arg("query"), nb::arg("cache"), nb::arg("plan"), nb::arg("out") = nb::none(),
          nb::arg("lse") = nb::none(), nb::kw_only(), nb::arg("out_scale") = nb::none(),
          nb::arg("query_scale") = nb::none(), nb::arg("stream") = nb::none(),
          "Attention over a paged cache. Returns out.\n\n"
          "query: query_dtype [>= num_tokens, num_q_heads, head_dim]; uint8 holds 8-bit floats.\n"
          "out: output_dtype [>= num_tokens, num_q_heads, head_dim_v]; None makes one of the query's kind and rows.\n"
          "lse: float32 [num_q_heads, >= num_tokens], written if given: natural log of the sum of exp of the scores, "
          "sink included.\n"
          "out_scale: float32, for outputs of 8-bit floats and no others: they are the results divided by it. [1], "
          "read; "
          "or, with output_scales=\"per_token_group\", [>= num_tokens, num_q_heads, ceil(head_dim_v / 128)], written.\n"
          "query_scale: float32 [1], [num_kv_heads] or [num_requests, num_kv_heads], for queries of 8-bit floats and "
          "no "
          "others: what their elements are multiplied by.\n"
          "Rows without a visible key: out = 0, lse = -inf (the sink, if there is one).")
      .def("forward", &forward_dense, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("plan"),
           nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(), nb::kw_only(), nb::arg("out_scale") = nb::none(),
           nb::arg("query_scale") = nb::none(), nb::arg("key_scale") = nb::none(), nb::arg("value_scale") = nb::none(),
           nb::arg("stream") = nb::none(),
           "Attention over dense keys and values, for layers without a cache. Returns out.\n\n"
           "key: kv_dtype [sum of seq_lens, num_kv_heads, head_dim]; value likewise with head_dim_v; uint8 holds 8-bit "
           "floats.\n"
           "key_scale, value_scale: float32, of 8-bit ones: [1], [num_kv_heads], [num_requests, num_kv_heads] or "
           "[num_keys, num_kv_heads, 1], as the layer's kv_scales says.");
}

}  // namespace qkv::python
