// LayerSpec, Batch, KvCache, Plan: the plain data that Attention works on.
#include <fmt/format.h>

#include "bindings.hpp"

namespace qkv::python {
namespace {

AttentionType parse_type(const std::string& name) {
  for (const AttentionType type :
       {AttentionType::decoder, AttentionType::encoder_only, AttentionType::encoder, AttentionType::encoder_decoder}) {
    if (name == to_string(type)) return type;
  }
  throw Error(ErrorCode::invalid_argument, "type", "\"" + name + "\"",
              "\"decoder\", \"encoder_only\", \"encoder\" or \"encoder_decoder\"");
}

KvScales parse_kv_scales(const std::string& name) {
  for (const KvScales scales : {KvScales::none, KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head,
                                KvScales::per_token_head}) {
    if (name == to_string(scales)) return scales;
  }
  throw Error(ErrorCode::invalid_argument, "kv_scales", "\"" + name + "\"",
              "\"none\", \"per_tensor\", \"per_head\", \"per_request_head\" or \"per_token_head\"");
}

}  // namespace

OutputScales parse_output_scales(const std::string& name) {
  for (const OutputScales scales : {OutputScales::per_tensor, OutputScales::per_token_group}) {
    if (name == to_string(scales)) return scales;
  }
  throw Error(ErrorCode::invalid_argument, "output_scales", "\"" + name + "\"",
              "\"per_tensor\" or \"per_token_group\"");
}

namespace {

KeyRun parse_run(const std::string& name) {
  for (const KeyRun run : {KeyRun::all, KeyRun::context, KeyRun::new_tokens}) {
    if (name == to_string(run)) return run;
  }
  throw Error(ErrorCode::invalid_argument, "key_run", "\"" + name + "\"", "\"all\", \"context\" or \"new_tokens\"");
}

std::string describe(const Shard& shard) {
  return fmt::format("Shard(rank={}, num_ranks={}, interleave_size={})", shard.rank, shard.num_ranks,
                     shard.interleave_size);
}

std::string describe(const CacheSpec& spec) { return fmt::format("CacheSpec(page_size={})", spec.page_size); }

void init_spec(LayerSpec* self, int32_t num_q_heads, int32_t num_kv_heads, int32_t head_dim, int32_t head_dim_v,
               const std::string& query_dtype, const std::string& kv_dtype, const std::string& kv_scales,
               const std::optional<std::string>& output_dtype, const std::string& type,
               const std::optional<CacheSpec>& cache, const std::optional<MaskArgument>& mask,
               std::optional<float> scale, float softcap, const std::vector<float>& alibi_slopes,
               bool alibi_per_request, const std::vector<float>& sinks, const std::string& key_run, const Shard& shard,
               const std::string& output_scales) {
  LayerSpec spec;
  spec.num_q_heads = num_q_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.head_dim = head_dim;
  spec.head_dim_v = head_dim_v;
  spec.query_dtype = parse_dtype(query_dtype, "query_dtype");
  spec.kv_dtype = parse_dtype(kv_dtype, "kv_dtype");
  spec.kv_scales = parse_kv_scales(kv_scales);
  if (output_dtype) spec.output_dtype = parse_dtype(*output_dtype, "output_dtype");
  spec.type = parse_type(type);
  spec.cache = cache;
  if (mask) spec.mask = to_mask(*mask);
  spec.scale = scale;
  spec.softcap = softcap;
  spec.alibi_slopes = alibi_slopes;
  spec.alibi_per_request = alibi_per_request;
  spec.sinks = sinks;
  spec.key_run = parse_run(key_run);
  spec.shard = shard;
  spec.output_scales = parse_output_scales(output_scales);
  new (self) LayerSpec(std::move(spec));
}

std::string describe(const LayerSpec& spec) {
  return fmt::format(
      "LayerSpec(num_q_heads={}, num_kv_heads={}, head_dim={}, head_dim_v={}, query_dtype='{}', kv_dtype='{}', "
      "kv_scales='{}', output_dtype='{}', type='{}', cache={}, mask='{}', scale={}, softcap={}, alibi={}, sinks={}, "
      "key_run='{}', shard={}, output_scales='{}')",
      spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim(), to_string(spec.query_dtype),
      to_string(spec.kv_dtype), to_string(spec.kv_scales), to_string(spec.out_dtype()), to_string(spec.type),
      spec.cache ? describe(*spec.cache) : "None", spec.effective_mask().text(), spec.effective_scale(), spec.softcap,
      spec.alibi_per_request || !spec.alibi_slopes.empty() ? "True" : "False", spec.sinks.empty() ? "False" : "True",
      to_string(spec.key_run), describe(spec.shard), to_string(spec.output_scales));
}

void bind_spec(nb::module_& module) {
  nb::class_<CacheSpec>(module, "CacheSpec",
                        "A paged cache. Its layout is said by the strides of the arrays in KvCache.")
      .def(nb::init<int32_t>(), nb::arg("page_size") = 16, "page_size: tokens a page, any number >= 1.")
      .def_ro("page_size", &CacheSpec::page_size)
      .def("__repr__", [](const CacheSpec& spec) { return describe(spec); });

  nb::class_<Shard>(module, "Shard",
                    "Ranks that share a cache: runs of interleave_size tokens go round the ranks, rank 0 first.")
      .def(nb::init<int32_t, int32_t, int32_t>(), nb::arg("rank") = 0, nb::arg("num_ranks") = 1,
           nb::arg("interleave_size") = 1)
      .def_ro("rank", &Shard::rank)
      .def_ro("num_ranks", &Shard::num_ranks)
      .def_ro("interleave_size", &Shard::interleave_size)
      .def("rank_of", &Shard::rank_of, nb::arg("position"), "Which rank keeps the token at a position.")
      .def("local_position", &Shard::local_position, nb::arg("position"), "Where, among the tokens that it keeps.")
      .def("position", &Shard::position, nb::arg("local"), "Where this rank's token sits in the request.")
      .def("local_length", &Shard::local_length, nb::arg("num_tokens"),
           "How many of a request's first tokens this rank keeps.")
      .def("max_local_length", &Shard::max_local_length, nb::arg("num_tokens"), "How many any rank keeps, at most.")
      .def("__eq__", [](const Shard& self, const Shard& other) { return self == other; })
      .def("__repr__", [](const Shard& shard) { return describe(shard); });

  const char* doc =
      "What a layer is: everything that kernels are chosen for. Nothing here changes from step to step.\n\n"
      "num_q_heads, num_kv_heads: query head h reads KV head h // (num_q_heads // num_kv_heads).\n"
      "head_dim: of query and key. head_dim_v: of value and output, 0 = head_dim.\n"
      "query_dtype, kv_dtype, output_dtype: \"f32\", \"f16\", \"bf16\", \"f8e4m3\" or \"f8e5m2\", kv_dtype also "
      "\"i8\"; output_dtype=None means query_dtype, or bf16 if that is 8-bit.\n"
      "kv_scales: what has a scale of its own in 8-bit keys and values: \"per_tensor\", \"per_head\", "
      "\"per_request_head\" or \"per_token_head\"; \"none\" for others.\n"
      "type: \"decoder\", \"encoder_only\", \"encoder\" or \"encoder_decoder\".\n"
      "cache: CacheSpec(page_size=...) for paged keys and values, None for dense ones.\n"
      "mask: the whole mask, as an expression of qkv.mask or as text; None means the type's default.\n"
      "scale: None means 1 / sqrt(head_dim). softcap: c > 0 turns a score s into c * tanh(s / c).\n"
      "alibi_slopes: [num_q_heads]. alibi_per_request: the slopes come with the batch.\n"
      "sinks: [num_q_heads] logits that join the denominator once.\n"
      "key_run: which keys the layer is shown: \"all\", \"context\" (without the new tokens) or \"new_tokens\".\n"
      "shard: Shard(...), where ranks share the keys; masks and ALiBi keep the positions of whole requests.\n"
      "output_scales: what has a scale of its own in an output of 8-bit floats: \"per_tensor\", which is given, or "
      "\"per_token_group\", which forward chooses and writes.";
  nb::class_<LayerSpec>(module, "LayerSpec", doc)
      .def("__init__", &init_spec, nb::kw_only(), nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
           nb::arg("head_dim_v") = 0, nb::arg("query_dtype") = "f32", nb::arg("kv_dtype") = "f32",
           nb::arg("kv_scales") = "none", nb::arg("output_dtype") = nb::none(), nb::arg("type") = "decoder",
           nb::arg("cache") = nb::none(), nb::arg("mask") = nb::none(), nb::arg("scale") = nb::none(),
           nb::arg("softcap") = 0.0f, nb::arg("alibi_slopes") = nb::tuple(), nb::arg("alibi_per_request") = false,
           nb::arg("sinks") = nb::tuple(), nb::arg("key_run") = "all", nb::arg("shard") = Shard{},
           nb::arg("output_scales") = "per_tensor")
      .def_ro("num_q_heads", &LayerSpec::num_q_heads)
      .def_ro("num_kv_heads", &LayerSpec::num_kv_heads)
      .def_ro("head_dim", &LayerSpec::head_dim)
      .def_prop_ro("head_dim_v", &LayerSpec::value_dim)
      .def_prop_ro("query_dtype", [](const LayerSpec& spec) { return std::string(to_string(spec.query_dtype)); })
      .def_prop_ro("kv_dtype", [](const LayerSpec& spec) { return std::string(to_string(spec.kv_dtype)); })
      .def_prop_ro("kv_scales", [](const LayerSpec& spec) { return std::string(to_string(spec.kv_scales)); })
      .def_prop_ro("output_dtype", [](const LayerSpec& spec) { return std::string(to_string(spec.out_dtype())); })
      .def_prop_ro("output_scales", [](const LayerSpec& spec) { return std::string(to_string(spec.output_scales)); })
      .def_prop_ro("type", [](const LayerSpec& spec) { return std::string(to_string(spec.type)); })
      .def_ro("cache", &LayerSpec::cache)
      .def_prop_ro("mask", &LayerSpec::effective_mask, "The mask in force.")
      .def_prop_ro("scale", &LayerSpec::effective_scale, "The scale in force.")
      .def_ro("softcap", &LayerSpec::softcap)
      .def_ro("alibi_slopes", &LayerSpec::alibi_slopes)
      .def_ro("alibi_per_request", &LayerSpec::alibi_per_request)
      .def_ro("sinks", &LayerSpec::sinks)
      .def_prop_ro("key_run", [](const LayerSpec& spec) { return std::string(to_string(spec.key_run)); })
      .def_ro("shard", &LayerSpec::shard)
      .def("__repr__", [](const LayerSpec& spec) { return describe(spec); });
}

PrefixSharing parse_sharing(const std::string& name) {
  for (const PrefixSharing sharing : {PrefixSharing::automatic, PrefixSharing::always, PrefixSharing::off}) {
    if (name == to_string(sharing)) return sharing;
  }
  throw Error(ErrorCode::invalid_argument, "prefix_sharing", "\"" + name + "\"",
              "\"automatic\", \"always\" or \"off\"");
}

using GroupArgument = std::pair<std::vector<int32_t>, int32_t>;

void init_batch(HeldBatch* self, const ArrayArgument& query_start_loc, const ArrayArgument& seq_lens,
                const ArrayArgument& block_table, const ArrayArgument& slot_mapping, const OperandDict& mask_operands,
                const ArrayArgument& alibi_slopes, const std::vector<GroupArgument>& prefix_groups,
                const std::string& prefix_sharing, bool prefix_sharing_keeps_bits) {
  HeldBatch held;
  held.query_start_loc = read_tensor(query_start_loc, "query_start_loc");
  held.seq_lens = read_optional_tensor(seq_lens, "seq_lens");
  held.block_table = read_optional_tensor(block_table, "block_table");
  held.slot_mapping = read_optional_tensor(slot_mapping, "slot_mapping");
  held.alibi_slopes = read_optional_tensor(alibi_slopes, "alibi_slopes");
  held.operands = read_operands(mask_operands);
  held.batch = {held.query_start_loc.view, held.seq_lens.view,     held.block_table.view,
                held.slot_mapping.view,    held.operands.operands, held.alibi_slopes.view};
  held.batch.prefix_sharing = parse_sharing(prefix_sharing);
  held.batch.prefix_sharing_keeps_bits = prefix_sharing_keeps_bits;
  for (const auto& [requests, num_tokens] : prefix_groups) held.batch.prefix_groups.push_back({requests, num_tokens});
  new (self) HeldBatch(std::move(held));
}

void bind_batch(nb::module_& module) {
  nb::class_<HeldBatch>(module, "Batch", "One step's requests: prefill and decode mixed in any order.")
      .def("__init__", &init_batch, nb::arg("query_start_loc"), nb::arg("seq_lens") = nb::none(),
           nb::arg("block_table") = nb::none(), nb::arg("slot_mapping") = nb::none(), nb::kw_only(),
           nb::arg("mask_operands") = nb::dict(), nb::arg("alibi_slopes") = nb::none(),
           nb::arg("prefix_groups") = nb::tuple(), nb::arg("prefix_sharing") = "automatic",
           nb::arg("prefix_sharing_keeps_bits") = true,
           "query_start_loc: int32 [num_requests + 1], prefix sums of new tokens a request, from 0.\n"
           "seq_lens: int32 [num_requests], keys of each request, cached and new. Encoder layers may leave it out.\n"
           "block_table: int32 [num_requests, max_pages], page numbers by position; for layers with a cache.\n"
           "slot_mapping: int64 [num_written_tokens], page * page_size + offset of each new token, -1 = nowhere; for "
           "update_cache.\n"
           "mask_operands: {name: int32 array}, the values of the mask's operands.\n"
           "alibi_slopes: float32 [num_requests, num_q_heads], for layers with alibi_per_request.\n"
           "prefix_groups: [(requests, num_tokens), ...], requests whose first num_tokens keys lie in the same pages; "
           "none given: the planner finds them.\n"
           "prefix_sharing: \"automatic\" (where it pays), \"always\" or \"off\". prefix_sharing_keeps_bits=False lets "
           "it "
           "take a quicker kernel, whose results agree within rounding.");
}

void bind_shard_slots(nb::module_& module) {
  module.def(
      "shard_slots",
      [](const HeldBatch& batch, int32_t page_size, const Shard& shard) {
        auto* slots = new std::vector<int64_t>(shard_slots(batch.batch, page_size, shard));
        const nb::capsule owner(slots, [](void* held) noexcept { delete static_cast<std::vector<int64_t>*>(held); });
        return nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(slots->data(), {slots->size()}, owner);
      },
      nb::arg("batch"), nb::arg("page_size"), nb::arg("shard"),
      "The batch's slot_mapping on a rank: int64 [num_tokens], -1 where another rank keeps the token. block_table: "
      "entry "
      "i holds the rank's tokens [i * page_size, (i + 1) * page_size).");
}

std::optional<DType> parse_declared(const std::optional<std::string>& dtype) {
  if (!dtype) return {};
  return parse_dtype(*dtype, "dtype");
}

void bind_cache(nb::module_& module) {
  const char* doc =
      "A layer's paged cache as two views of any strides; the last axis must be contiguous.\n\n"
      "key: kv_dtype [num_pages, page_size, num_kv_heads, head_dim].\n"
      "value: kv_dtype [num_pages, page_size, num_kv_heads, head_dim_v].\n"
      "key_scale, value_scale: float32, of 8-bit caches: [1], [num_kv_heads], [num_requests, num_kv_heads] or "
      "[num_pages, page_size, num_kv_heads], as LayerSpec's kv_scales says.\n"
      "dtype: what arrays of uint8 hold, \"f8e4m3\" or \"f8e5m2\"; other arrays say it themselves.";
  nb::class_<HeldCache>(module, "KvCache", doc)
      .def(
          "__init__",
          [](HeldCache* self, const ArrayArgument& key, const ArrayArgument& value, const ArrayArgument& key_scale,
             const ArrayArgument& value_scale, const std::optional<std::string>& dtype) {
            HeldCache cache{key, value, 0, key_scale, value_scale, parse_declared(dtype)};
            cache.read();
            new (self) HeldCache(std::move(cache));
          },
          nb::arg("key"), nb::arg("value"), nb::kw_only(), nb::arg("key_scale") = nb::none(),
          nb::arg("value_scale") = nb::none(), nb::arg("dtype") = nb::none())
      .def_static(
          "from_interleaved",
          [](const ArrayArgument& key_value, int32_t head_dim, const ArrayArgument& key_scale,
             const ArrayArgument& value_scale, const std::optional<std::string>& dtype) {
            HeldCache cache{key_value, nb::none(), head_dim, key_scale, value_scale, parse_declared(dtype)};
            cache.read();
            return cache;
          },
          nb::arg("key_value"), nb::arg("head_dim"), nb::kw_only(), nb::arg("key_scale") = nb::none(),
          nb::arg("value_scale") = nb::none(), nb::arg("dtype") = nb::none(),
          "Views of one array [num_pages, num_kv_heads, page_size, head_dim + head_dim_v] of any strides, in which the "
          "key and the value of a token lie side by side.");
}

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan",
                   "A batch turned into work items; built once a step, shared by all layers of the same kind.")
      .def_prop_ro("num_requests", &Plan::num_requests)
      .def_prop_ro("num_tokens", &Plan::num_tokens, "New tokens of all requests.")
      .def_prop_ro("num_work_items", &Plan::num_work_items)
      .def_prop_ro("workspace_bytes", &Plan::workspace_bytes, "Bytes of partial states during forward.")
      .def("dump", &Plan::dump, "What the plan would do, as text.")
      .def_prop_ro(
          "predicted_seconds", [](const Plan& plan) { return plan.report().seconds; },
          "Of one forward call, by the cost model.")
      .def("__repr__", [](const Plan& plan) {
        return fmt::format("Plan(num_requests={}, num_tokens={}, num_work_items={})", plan.num_requests(),
                           plan.num_tokens(), plan.num_work_items());
      });
}

}  // namespace

HeldCache::View HeldCache::view(bool writable) const {
  const auto import_tensor = writable ? &write_tensor : &read_tensor;
  View view;
  if (value.is_none()) {
    view.key = import_tensor(key, "key_value", dtype);
    view.cache = KvCache::from_interleaved(view.key.view, interleaved_head_dim);
  } else {
    view.key = import_tensor(key, "cache.key", dtype);
    view.value = import_tensor(value, "cache.value", dtype);
    view.cache = {view.key.view, view.value.view};
  }
  // Scales of tokens are written with them, others never are.
  const auto import_scale = [&](nb::handle scale, const char* argument) {
    HeldTensor tensor = read_optional_tensor(scale, argument);
    return writable && tensor.view.rank == 3 ? write_tensor(scale, argument) : tensor;
  };
  view.key_scale = import_scale(key_scale, "cache.key_scale");
  view.value_scale = import_scale(value_scale, "cache.value_scale");
  view.cache.key_scale = view.key_scale.view;
  view.cache.value_scale = view.value_scale.view;
  return view;
}

void bind_layer(nb::module_& module) {
  bind_spec(module);
  bind_batch(module);
  bind_shard_slots(module);
  bind_cache(module);
  bind_plan(module);
  module.def(
      "explain", [](const LayerSpec& spec, const std::string& device) { return explain(spec, parse_device(device)); },
      nb::arg("spec"), nb::arg("device") = "cpu",
      "Why a layer cannot run: one sentence a reason. Empty = Attention(spec, device) succeeds.");
  module.def(
      "support_matrix", [](const std::string& device) { return support_matrix(parse_device(device).kind); },
      nb::arg("device") = "cpu",
      "The feature x feature table of one device kind as text, printed from the rules that explain() runs.");
}

}  // namespace qkv::python
