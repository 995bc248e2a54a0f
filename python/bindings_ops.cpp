// Single calls: varlen_attention, merge_states, lse_from_lse2, cache_write, and the float64 reference.
#include <nanobind/stl/pair.h>

#include "bindings.hpp"

namespace qkv::python {
namespace {

nb::any varlen(const ArrayArgument& query, const ArrayArgument& key, const ArrayArgument& value,
               const ArrayArgument& query_start_loc, const ArrayArgument& seq_lens, const ArrayArgument& block_table,
               const std::optional<MaskArgument>& mask, const OperandDict& mask_operands, std::optional<float> scale,
               float softcap, const ArrayArgument& alibi_slopes, const ArrayArgument& sinks, const ArrayArgument& out,
               const ArrayArgument& lse, const ArrayArgument& key_scale, const ArrayArgument& value_scale,
               const ArrayArgument& out_scale, const ArrayArgument& query_scale, const StreamArgument& stream) {
  const HeldTensor query_tensor = read_tensor(query, "query");
  const Stream on = read_stream(stream, query_tensor.view.device);
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  const HeldTensor starts = read_tensor(query_start_loc, "query_start_loc");
  const HeldTensor lengths = read_tensor(seq_lens, "seq_lens");
  const HeldTensor table = read_optional_tensor(block_table, "block_table");
  const HeldTensor slopes = read_optional_tensor(alibi_slopes, "alibi_slopes");
  const HeldTensor sink_tensor = read_optional_tensor(sinks, "sinks");
  const HeldTensor key_scales = read_optional_tensor(key_scale, "key_scale");
  const HeldTensor value_scales = read_optional_tensor(value_scale, "value_scale");
  const HeldTensor output_scale = output_scale_tensor(out_scale);
  const HeldTensor scale_of_query = read_optional_tensor(query_scale, "query_scale");
  const HeldOperands operands = read_operands(mask_operands);
  const Tensor& q = query_tensor.view;
  const Tensor& v = value_tensor.view;
  const DType out_dtype = size_bytes(q.dtype) == 1 ? DType::bf16 : q.dtype;
  nb::any result = output_or_zeros(out, query, {q.shape[0], q.shape[1], v.shape[v.rank - 1]}, out_dtype, stream);
  const HeldTensor out_tensor = write_tensor(result, "out");
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");

  VarlenArguments arguments;
  arguments.query = q;
  arguments.key = key_tensor.view;
  arguments.value = v;
  arguments.query_start_loc = starts.view;
  arguments.seq_lens = lengths.view;
  arguments.block_table = table.view;
  if (mask) arguments.mask = to_mask(*mask);
  arguments.mask_operands = operands.operands;
  arguments.scale = scale;
  arguments.softcap = softcap;
  arguments.alibi_slopes = slopes.view;
  arguments.sinks = sink_tensor.view;
  arguments.out = out_tensor.view;
  arguments.lse = lse_tensor.view;
  arguments.key_scale = key_scales.view;
  arguments.value_scale = value_scales.view;
  arguments.out_scale = output_scale.view;
  arguments.query_scale = scale_of_query.view;
  arguments.stream = on;
  {
    nb::gil_scoped_release released;
    varlen_attention(arguments);
  }
  return result;
}

nb::any merge(const std::vector<std::pair<ArrayArgument, ArrayArgument>>& states, const ArrayArgument& out,
              const ArrayArgument& lse, const ArrayArgument& out_scale, const StreamArgument& stream) {
  if (states.empty()) throw Error(ErrorCode::invalid_argument, "states", "none", "at least one (out, lse)");
  std::vector<HeldTensor> owners;
  std::vector<State> views;
  for (size_t i = 0; i < states.size(); ++i) {
    const std::string name = "states[" + std::to_string(i) + "]";
    owners.push_back(read_tensor(states[i].first, (name + ".out").c_str()));
    owners.push_back(read_tensor(states[i].second, (name + ".lse").c_str()));
    views.push_back({owners[2 * i].view, owners[2 * i + 1].view});
  }
  const Tensor& first = views[0].out;
  const Stream on = read_stream(stream, first.device);
  nb::any result =
      output_or_zeros(out, states[0].first, {first.shape[0], first.shape[1], first.shape[2]}, first.dtype, stream);
  const HeldTensor out_tensor = write_tensor(result, "out");
  const HeldTensor lse_tensor = write_optional_tensor(lse, "lse");
  const HeldTensor scale = output_scale_tensor(out_scale);
  {
    nb::gil_scoped_release released;
    merge_states(views, out_tensor.view, lse_tensor.view, on, scale.view);
  }
  return result;
}

void write_to_cache(const ArrayArgument& key, const ArrayArgument& value, const HeldCache& cache,
                    const ArrayArgument& slot_mapping, const StreamArgument& stream) {
  const HeldTensor key_tensor = read_tensor(key, "key");
  const HeldTensor value_tensor = read_tensor(value, "value");
  const HeldTensor slots = read_tensor(slot_mapping, "slot_mapping");
  const HeldCache::View view = cache.write();
  const Stream on = read_stream(stream, view.cache.key.device);
  nb::gil_scoped_release released;
  cache_write(key_tensor.view, value_tensor.view, view.cache, slots.view, on);
}

ScaleSource read_scale_source(const std::string& name) {
  for (const ScaleSource source : {ScaleSource::given, ScaleSource::chosen}) {
    if (name == to_string(source)) return source;
  }
  throw Error(ErrorCode::invalid_argument, "source", "\"" + name + "\"", "\"given\" or \"chosen\"");
}

void round_rows(const ArrayArgument& rows, const ArrayArgument& out, const ArrayArgument& scale,
                const std::string& source_name, const ArrayArgument& query_start_loc, const StreamArgument& stream) {
  const ScaleSource source = read_scale_source(source_name);
  const HeldTensor rows_tensor = read_tensor(rows, "rows");
  const HeldTensor out_tensor = write_tensor(out, "out");
  const HeldTensor scale_tensor =
      source == ScaleSource::chosen ? write_tensor(scale, "scale") : read_tensor(scale, "scale");
  const HeldTensor starts = read_optional_tensor(query_start_loc, "query_start_loc");
  const Stream on = read_stream(stream, rows_tensor.view.device);
  nb::gil_scoped_release released;
  quantise(rows_tensor.view, out_tensor.view, scale_tensor.view, source, starts.view, on);
}

void gather(const ArrayArgument& pages, const ArrayArgument& block_table, const ArrayArgument& starts,
            const ArrayArgument& cu_seq_lens, const ArrayArgument& rows, const ArrayArgument& scale,
            const StreamArgument& stream) {
  const HeldTensor pages_tensor = read_tensor(pages, "pages");
  const HeldTensor table = read_tensor(block_table, "block_table");
  const HeldTensor first = read_tensor(starts, "starts");
  const HeldTensor sums = read_tensor(cu_seq_lens, "cu_seq_lens");
  const HeldTensor rows_tensor = write_tensor(rows, "rows");
  const HeldTensor scale_tensor = read_optional_tensor(scale, "scale");
  const Stream on = read_stream(stream, pages_tensor.view.device);
  nb::gil_scoped_release released;
  gather_cache(pages_tensor.view, table.view, first.view, sums.view, rows_tensor.view, on, scale_tensor.view);
}

using NumpyDoubles = nb::ndarray<nb::numpy, double>;
using OutAndLse = std::pair<NumpyDoubles, NumpyDoubles>;

// A float64 numpy array that owns a vector.
NumpyDoubles to_numpy(std::vector<double> values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<double>(std::move(values));
  const nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<double>*>(pointer); });
  return NumpyDoubles(owned->data(), shape, owner);
}

OutAndLse to_tuple(reference::Result result, const LayerSpec& spec) {
  const auto heads = static_cast<size_t>(spec.num_q_heads);
  const size_t tokens = result.lse.size() / heads;
  return {to_numpy(std::move(result.out), {tokens, heads, static_cast<size_t>(spec.value_dim())}),
          to_numpy(std::move(result.lse), {heads, tokens})};
}

OutAndLse reference_paged(const LayerSpec& spec, const HeldBatch& batch, const ArrayArgument& query,
                          const HeldCache& cache, const ArrayArgument& query_scale) {
  const HeldTensor scale = read_optional_tensor(query_scale, "query_scale");
  return to_tuple(
      reference::attention(spec, batch.batch, read_tensor(query, "query").view, cache.read().cache, scale.view), spec);
}

OutAndLse reference_dense(const LayerSpec& spec, const HeldBatch& batch, const ArrayArgument& query,
                          const ArrayArgument& key, const ArrayArgument& value, const ArrayArgument& query_scale,
                          const ArrayArgument& key_scale, const ArrayArgument& value_scale) {
  const HeldTensor scale = read_optional_tensor(query_scale, "query_scale");
  const HeldTensor scale_of_key = read_optional_tensor(key_scale, "key_scale");
  const HeldTensor scale_of_value = read_optional_tensor(value_scale, "value_scale");
  return to_tuple(
      reference::attention(spec, batch.batch, read_tensor(query, "query").view, read_tensor(key, "key").view,
                           read_tensor(value, "value").view, scale.view, scale_of_key.view, scale_of_value.view),
      spec);
}

}  // namespace

void bind_ops(nb::module_& module) {
  module.def(
      "varlen_attention", &varlen, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("query_start_loc"),
      nb::arg("seq_lens"), nb::kw_only(), nb::arg("block_table") = nb::none(), nb::arg("mask") = nb::none(),
      nb::arg("mask_operands") = nb::dict(), nb::arg("scale") = nb::none(), nb::arg("softcap") = 0.0f,
      nb::arg("alibi_slopes") = nb::none(), nb::arg("sinks") = nb::none(), nb::arg("out") = nb::none(),
      nb::arg("lse") = nb::none(), nb::arg("key_scale") = nb::none(), nb::arg("value_scale") = nb::none(),
      nb::arg("out_scale") = nb::none(), nb::arg("query_scale") = nb::none(), nb::arg("stream") = nb::none(),
      "Attention of a variable-length batch in one call. Returns out.\n\n"
      "query: [>= num_tokens, num_q_heads, head_dim].\n"
      "key: [num_keys, num_kv_heads, head_dim], requests one after another; or, with block_table, pages: "
      "[num_pages, page_size, num_kv_heads, head_dim]. value: likewise with head_dim_v.\n"
      "query_start_loc: int32 [num_requests + 1]. seq_lens: int32 [num_requests], keys of each request.\n"
      "block_table: int32 [num_requests, max_pages].\n"
      "mask: an expression of qkv.mask, or text; None: everything is visible. mask_operands: {name: int32}.\n"
      "alibi_slopes: float32 [num_q_heads] or [num_requests, num_q_heads]. sinks: float32 [num_q_heads].\n"
      "out: [>= num_tokens, num_q_heads, head_dim_v]; None makes one of the query's kind, dtype (bf16 for 8-bit "
      "floats) and rows.\n"
      "lse: float32 [num_q_heads, >= num_tokens], written if given (natural log).\n"
      "key_scale, value_scale: float32, of 8-bit keys and values: shapes as in KvCache and, dense, Attention.forward. "
      "out_scale, query_scale: as in Attention.\n"
      "stream: as in Attention. On a GPU, query_start_loc, seq_lens, block_table, mask_operands, alibi_slopes and "
      "sinks are host arrays all the same.");
  module.def("merge_states", &merge, nb::arg("states"), nb::arg("out") = nb::none(), nb::arg("lse") = nb::none(),
             nb::kw_only(), nb::arg("out_scale") = nb::none(), nb::arg("stream") = nb::none(),
             "Joins states over disjoint keys, in the order given. Returns out.\n\n"
             "states: [(out, lse), ...] with out [num_tokens, num_heads, head_dim_v] and lse float32 [num_heads, "
             "num_tokens]. A state with lse = -inf is empty: its out is not read.\n"
             "out, lse: as in a state; may be those of a state. None makes an out like the first state's.\n"
             "out_scale: float32, with an out of 8-bit floats: [1], read, or [>= num_tokens, num_heads, "
             "ceil(head_dim_v / 128)], written.\n"
             "stream: as in Attention.");
  module.def(
      "lse_from_lse2", [](const ArrayArgument& lse) { lse_from_lse2(write_tensor(lse, "lse").view); }, nb::arg("lse"),
      "From an LSE in base 2 to the natural one, in place (float32, any shape).");
  module.def("cache_write", &write_to_cache, nb::arg("key"), nb::arg("value"), nb::arg("cache"),
             nb::arg("slot_mapping"), nb::kw_only(), nb::arg("stream") = nb::none(),
             "Writes tokens to slots: see Attention.update_cache.\n\n"
             "slot_mapping: int64 [num_slots], page * page_size + offset; -1 = nowhere; a host array.\n"
             "stream: as in Attention.");
  module.def(
      "quantise", &round_rows, nb::arg("rows"), nb::arg("out"), nb::arg("scale"), nb::arg("source"), nb::kw_only(),
      nb::arg("query_start_loc") = nb::none(), nb::arg("stream") = nb::none(),
      "Rounds rows to 8-bit floats, such as the queries of Attention.forward: out = round(rows / scale).\n\n"
      "rows: [num_tokens, num_heads, head_dim], float32, float16 or bfloat16. out: likewise, of 8-bit floats.\n"
      "scale: float32 [1], [num_scales] or [num_requests, num_scales]; num_heads / num_scales neighbouring heads "
      "share one.\n"
      "source: \"given\": scales are read; \"chosen\": written, each so that the largest finite magnitude of "
      "its rows becomes the largest number.\n"
      "query_start_loc: int32 [num_requests + 1], beside rows on their device; with scales of requests only.\n"
      "stream: as in Attention.");
  module.def("gather_cache", &gather, nb::arg("pages"), nb::arg("block_table"), nb::arg("starts"),
             nb::arg("cu_seq_lens"), nb::arg("rows"), nb::kw_only(), nb::arg("scale") = nb::none(),
             nb::arg("stream") = nb::none(),
             "Copies cached tokens to dense rows: row cu_seq_lens[i] + t is token starts[i] + t of request i.\n\n"
             "pages: [num_pages, page_size, num_heads, head_dim], or of latents [num_pages, page_size, head_dim].\n"
             "block_table, starts, cu_seq_lens: int32 host arrays. rows: like pages, without the axis of pages.\n"
             "scale: float32 [1], where 8-bit pages become rows of others: what elements are multiplied by.\n"
             "stream: as in Attention.");
  module.def("reference_attention", &reference_paged, nb::arg("spec"), nb::arg("batch"), nb::arg("query"),
             nb::arg("cache"), nb::arg("query_scale") = nb::none(),
             "The definition, in float64. Returns (out [num_tokens, num_q_heads, head_dim_v], lse [num_q_heads, "
             "num_tokens]).");
  module.def("reference_attention", &reference_dense, nb::arg("spec"), nb::arg("batch"), nb::arg("query"),
             nb::arg("key"), nb::arg("value"), nb::arg("query_scale") = nb::none(), nb::arg("key_scale") = nb::none(),
             nb::arg("value_scale") = nb::none());
}

}  // namespace qkv::python
