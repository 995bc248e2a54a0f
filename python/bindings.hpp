// The parts of the module _qkv, and the types that hold on to Python arrays between calls.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "qkv/qkv.hpp"
#include "tensor_argument.hpp"

namespace qkv::python {

void bind_mask(nb::module_& module);
void bind_layer(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_ops(nb::module_& module);
void bind_warmup(nb::module_& module);
void bind_mla(nb::module_& module);
void bind_context_parallel(nb::module_& module);
void bind_mla_context_parallel(nb::module_& module);
void bind_collectives(nb::module_& module);

// "f32" and so on, and "cpu" or "cuda:0", as the library prints them.
DType parse_dtype(const std::string& name, const char* argument);
OutputScales parse_output_scales(const std::string& name);
Device parse_device(const std::string& name);

// "all_to_all" and so on.
StateExchange parse_exchange(const std::string& name);

// A mask as an expression or as text.
using MaskArgument = std::variant<Mask, std::string>;
Mask to_mask(const MaskArgument& mask);

// Operands by name, and what keeps their values alive.
struct HeldOperands {
  std::vector<MaskOperand> operands;
  std::vector<HeldTensor> owners;
};
using OperandDict = nb::typed<nb::mapping, nb::str, ArrayArgument>;
HeldOperands read_operands(const OperandDict& operands);

struct HeldBatch {
  Batch batch;
  HeldTensor query_start_loc, seq_lens, block_table, slot_mapping, alibi_slopes;
  HeldOperands operands;
};

struct HeldCache {
  nb::object key, value;  // the caller's arrays; value is none when they are interleaved
  int32_t interleaved_head_dim = 0;
  nb::object key_scale = nb::none(), value_scale = nb::none();
  std::optional<DType> dtype = {};  // as declared

  // A call's own import: whether the arrays may be written is known only by the call.
  struct View {
    KvCache cache;
    HeldTensor key, value, key_scale, value_scale;
  };
  View read() const { return view(false); }
  View write() const { return view(true); }

 private:
  View view(bool writable) const;
};

// A projection and what keeps its matrix alive.
struct HeldProjection {
  Projection projection;
  HeldTensor matrix;
};

}  // namespace qkv::python
