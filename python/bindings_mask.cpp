// Masks as Python expressions:  qkv.mask.kv_pos() <= qkv.mask.q_pos()
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <map>
#include <tuple>
#include <utility>

#include "bindings.hpp"

namespace qkv::python {
namespace {

OperandScope parse_scope(const std::string& name) {
  if (name == "request") return OperandScope::request;
  if (name == "query") return OperandScope::query;
  if (name == "new_key") return OperandScope::new_key;
  if (name == "key") return OperandScope::key;
  throw Error(ErrorCode::invalid_argument, "scope", "\"" + name + "\"",
              "\"request\", \"query\", \"new_key\" or \"key\"");
}

const char* scope_name(OperandScope scope) {
  switch (scope) {
    case OperandScope::request:
      return "request";
    case OperandScope::query:
      return "query";
    case OperandScope::new_key:
      return "new_key";
    case OperandScope::key:
      return "key";
  }
  return "";
}

void bind_value(nb::module_& module) {
  nb::class_<MaskValue> type(module, "MaskValue", "An integer-valued expression. Integers mix with it.");
  type.def(nb::init<int64_t>(), nb::arg("constant"));
  nb::implicitly_convertible<int64_t, MaskValue>();
  using Value = const MaskValue&;
  const auto define = [&](const char* name, auto operation, const char* signature) {
    type.def(name, operation, nb::is_operator(), nb::sig(signature));
  };
  define(
      "__add__", [](Value a, Value b) { return a + b; }, "def __add__(self, other: MaskValue | int, /) -> MaskValue");
  define(
      "__sub__", [](Value a, Value b) { return a - b; }, "def __sub__(self, other: MaskValue | int, /) -> MaskValue");
  define(
      "__radd__", [](Value a, Value b) { return b + a; }, "def __radd__(self, other: int, /) -> MaskValue");
  define(
      "__rsub__", [](Value a, Value b) { return b - a; }, "def __rsub__(self, other: int, /) -> MaskValue");
  define(
      "__lt__", [](Value a, Value b) { return a < b; }, "def __lt__(self, other: MaskValue | int, /) -> Mask");
  define(
      "__le__", [](Value a, Value b) { return a <= b; }, "def __le__(self, other: MaskValue | int, /) -> Mask");
  define(
      "__gt__", [](Value a, Value b) { return a > b; }, "def __gt__(self, other: MaskValue | int, /) -> Mask");
  define(
      "__ge__", [](Value a, Value b) { return a >= b; }, "def __ge__(self, other: MaskValue | int, /) -> Mask");
  define(
      "__eq__", [](Value a, Value b) { return a == b; }, "def __eq__(self, other: MaskValue | int, /) -> Mask");
  define(
      "__ne__", [](Value a, Value b) { return a != b; }, "def __ne__(self, other: MaskValue | int, /) -> Mask");
  type.def("text", &MaskValue::text, "Canonical text.")
      .def("__str__", &MaskValue::text)
      .def("__repr__", [](Value value) { return "MaskValue('" + value.text() + "')"; });
}

void bind_expression(nb::module_& module) {
  nb::class_<Mask>(module, "Mask", "A truth-valued expression: true where the query sees the key. Join with & | ~.")
      .def(nb::init<>(), "Everything is visible.")
      .def(
          "__and__", [](const Mask& a, const Mask& b) { return a & b; }, nb::is_operator())
      .def(
          "__or__", [](const Mask& a, const Mask& b) { return a | b; }, nb::is_operator())
      .def("__invert__", [](const Mask& a) { return ~a; })
      .def("__bool__",
           [](const Mask&) -> bool {
             // `a <= b <= c` and `a and b` would silently drop a part of the mask.
             throw nb::type_error(
                 "a Mask has no truth value of its own: join masks with & | ~, and write "
                 "(a <= b) & (b <= c) for a <= b <= c");
           })
      .def(
          "__eq__", [](const Mask& a, const Mask& b) { return a.text() == b.text(); }, nb::is_operator(),
          nb::sig("def __eq__(self, arg: object, /) -> bool"), "Same canonical text.")
      .def("__hash__", [](const Mask& mask) { return static_cast<Py_hash_t>(mask.hash() >> 1); })
      .def("text", &Mask::text, "Canonical text; parse_mask(m.text()) has the same text and hash.")
      .def("hash", &Mask::hash, "A hash of the canonical text, stable across processes and versions.")
      .def("__str__", &Mask::text)
      .def("__repr__", [](const Mask& mask) { return "Mask('" + mask.text() + "')"; });
  module.def("parse_mask", &parse_mask, nb::arg("text"),
             "Reads the text form, for example \"causal & window(127, 0)\" or "
             "\"kv_pos <= q_pos & (kv_pos < prefix_len[request] | q_pos - kv_pos < 64)\".");
  module.def(
      "operands_of",
      [](const Mask& mask) {
        std::vector<std::pair<std::string, std::string>> names;
        for (const OperandDeclaration& operand : operands_of(mask)) {
          names.emplace_back(operand.name, scope_name(operand.scope));
        }
        return names;
      },
      nb::arg("mask"), "(name, scope) of the operands that a batch must supply for this mask, in order of name.");
}

// The names of qkv.mask. Documented there by their definitions.
void bind_definitions(nb::module_& module) {
  module.def("q_pos", &mask::q_pos, "Absolute position of the query: i + kv_len - q_len.");
  module.def("kv_pos", &mask::kv_pos, "Position of the key in its request.");
  module.def("q_head", &mask::q_head, "Query head.");
  module.def("request", &mask::request, "Index of the request in the batch.");
  module.def("q_len", &mask::q_len, "New tokens of the request.");
  module.def("kv_len", &mask::kv_len, "All keys of the request.");
  module.def(
      "operand",
      [](const std::string& name, const std::string& scope) { return mask::operand(name, parse_scope(scope)); },
      nb::arg("name"), nb::arg("scope"),
      "A value that comes with the batch: scope \"request\" [num_requests], \"query\" [num_tokens], \"new_key\" (the "
      "same array, read at the key; 0 for keys of the context) or \"key\" [sum of seq_lens]; int32.");
  module.def("everything", &mask::everything, "All pairs.");
  module.def("nothing", &mask::nothing, "No pair.");
  module.def("causal", &mask::causal, "kv_pos <= q_pos.");
  module.def("window", &mask::window, nb::arg("window_left"), nb::arg("window_right"),
             "Keys seen besides the own one on each side; -1 leaves a side open.");
  module.def("sliding_window", &mask::sliding_window, nb::arg("num_tokens"), nb::arg("bidirectional") = false,
             "A model's window of N tokens: the own one and the N-1 before it (bidirectional: and after it).");
  module.def("rswa", &mask::rswa, nb::arg("window_tokens"),
             "The first prefix_len[request] keys and the last window_tokens ones.");
  module.def("prefix_lm", &mask::prefix_lm, nb::arg("window_left") = -1, nb::arg("clamp") = false,
             "Causal, and bidirectional inside span_start[query] ... span_end[query]; see fill_prefix_lm_spans.");
  module.def("per_request_causal", &mask::per_request_causal, "Causal where causal[request] is not 0.");
  module.def("document", &mask::document, "A query sees the keys of its own document: query_document, key_document.");
  module.def("tree", &mask::tree, "Speculative token trees; see fill_tree.");
}

struct HeldScene {
  MaskScene scene;
  HeldOperands operands;
};

void bind_scene(nb::module_& module) {
  nb::class_<HeldScene>(module, "MaskScene", "Everything that fixes the truth of all pairs of one request.")
      .def(
          "__init__",
          [](HeldScene* self, int32_t q_len, int32_t kv_len, int32_t request, int32_t q_head, int64_t query_start,
             int64_t key_start, const OperandDict& operands) {
            HeldScene held{{request, q_head, q_len, kv_len, query_start, key_start, {}}, read_operands(operands)};
            held.scene.operands = held.operands.operands;
            new (self) HeldScene(std::move(held));
          },
          nb::arg("q_len"), nb::arg("kv_len"), nb::kw_only(), nb::arg("request") = 0, nb::arg("q_head") = 0,
          nb::arg("query_start") = 0, nb::arg("key_start") = 0, nb::arg("operands") = nb::dict(),
          "q_len, kv_len: new tokens and all keys. request, q_head: the indices that the mask reads.\n"
          "query_start, key_start: where the request begins in arrays of scope query and key.\n"
          "operands: {name: int32 array}.");
  module.def(
      "is_visible",
      [](const MaskArgument& mask, const HeldScene& scene, int32_t query, int32_t kv_pos) {
        return is_visible(to_mask(mask), scene.scene, query, kv_pos);
      },
      nb::arg("mask"), nb::arg("scene"), nb::arg("query"), nb::arg("kv_pos"), "The truth of one pair.");
  module.def(
      "classify_tile",
      [](const MaskArgument& mask, const HeldScene& scene, int32_t query_begin, int32_t query_end, int32_t kv_begin,
         int32_t kv_end) {
        return std::string(
            to_string(classify_tile(to_mask(mask), scene.scene, query_begin, query_end, kv_begin, kv_end)));
      },
      nb::arg("mask"), nb::arg("scene"), nb::arg("query_begin"), nb::arg("query_end"), nb::arg("kv_begin"),
      nb::arg("kv_end"), "\"empty\" and \"full\" are proofs about the tile; \"partial\" may be neither.");
  module.def(
      "draw_mask_text",
      [](const MaskArgument& mask, const HeldScene& scene, int32_t tile_q, int32_t tile_kv) {
        return draw_mask_text(to_mask(mask), scene.scene, tile_q, tile_kv);
      },
      nb::arg("mask"), nb::arg("scene"), nb::arg("tile_q") = 0, nb::arg("tile_kv") = 0,
      "One character a pair ('#' visible, '.' hidden), one line a query; tiles and their classes where sizes are "
      "given.");
  module.def(
      "draw_mask_png",
      [](const MaskArgument& mask, const HeldScene& scene, const std::string& path, int32_t tile_q, int32_t tile_kv) {
        draw_mask_png(to_mask(mask), scene.scene, path, tile_q, tile_kv);
      },
      nb::arg("mask"), nb::arg("scene"), nb::arg("path"), nb::arg("tile_q") = 0, nb::arg("tile_kv") = 0,
      "The same as a PNG file: visible pairs dark, tiles tinted by class.");
}

using NumpyInts = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>>;
using FilledOperands = std::map<std::string, NumpyInts>;

// An int32 numpy array that owns a vector.
NumpyInts to_numpy(std::vector<int32_t> values) {
  auto* owned = new std::vector<int32_t>(std::move(values));
  const nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<int32_t>*>(pointer); });
  return NumpyInts(owned->data(), {owned->size()}, owner);
}

void bind_makers(nb::module_& module) {
  module.def(
      "fill_prefix_lm_spans",
      [](const std::vector<std::tuple<int32_t, int32_t, int32_t>>& spans, const ArrayArgument& query_start_loc,
         const ArrayArgument& seq_lens) {
        std::vector<PrefixLmSpan> list;
        for (const auto& [request, start, end] : spans) list.push_back({request, start, end});
        PrefixLmOperands filled = fill_prefix_lm_spans(list, read_tensor(query_start_loc, "query_start_loc").view,
                                                       read_tensor(seq_lens, "seq_lens").view);
        return FilledOperands{{"span_start", to_numpy(std::move(filled.span_start))},
                              {"span_end", to_numpy(std::move(filled.span_end))}};
      },
      nb::arg("spans"), nb::arg("query_start_loc"), nb::arg("seq_lens"),
      "Operands of mask.prefix_lm() for Batch(mask_operands=...).\n\n"
      "spans: (request, start, end) in absolute positions, inclusive. query_start_loc, seq_lens: as in Batch.");
  module.def(
      "fill_tree",
      [](const std::vector<int32_t>& parents, const ArrayArgument& query_start_loc) {
        TreeOperands filled = fill_tree(parents, read_tensor(query_start_loc, "query_start_loc").view);
        return FilledOperands{{"tree_enter", to_numpy(std::move(filled.tree_enter))},
                              {"tree_leave", to_numpy(std::move(filled.tree_leave))}};
      },
      nb::arg("parents"), nb::arg("query_start_loc"),
      "Operands of mask.tree() for Batch(mask_operands=...).\n\n"
      "parents: of each new token, the index of its parent within its request's new tokens; -1 for a root.");
}

}  // namespace

Mask to_mask(const MaskArgument& mask) {
  if (const Mask* expression = std::get_if<Mask>(&mask)) return *expression;
  return parse_mask(std::get<std::string>(mask));
}

HeldOperands read_operands(const OperandDict& operands) {
  HeldOperands held;
  for (const auto& item : operands.items()) {
    const auto [key, values] = nb::cast<std::pair<nb::object, nb::object>>(item);
    std::string name;
    if (!nb::try_cast(key, name)) {
      throw Error(ErrorCode::invalid_argument, "mask_operands", "the key " + std::string(nb::repr(key).c_str()),
                  "names: str");
    }
    held.owners.push_back(read_tensor(values, ("mask_operands[" + name + "]").c_str()));
    held.operands.push_back({name, held.owners.back().view});
  }
  return held;
}

void bind_mask(nb::module_& module) {
  bind_value(module);
  bind_expression(module);
  bind_definitions(module);
  bind_scene(module);
  bind_makers(module);
}

}  // namespace qkv::python
