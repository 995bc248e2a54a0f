#include "mask/scene.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/checks.hpp"

namespace qkv::mask {
namespace {

struct Extent {
  int64_t begin;  // the request's first value
  int64_t end;
  const char* meaning;
};

Extent extent_of(OperandScope scope, const MaskScene& scene) {
  switch (scope) {
    case OperandScope::request:
      return {scene.request, int64_t{scene.request} + 1, "one value a request"};
    case OperandScope::key:
      return {scene.key_start, scene.key_start + scene.kv_len, "one value a key"};
    default:
      return {scene.query_start, scene.query_start + scene.q_len, "one value a new token"};
  }
}

void check_scene(const MaskScene& scene) {
  const auto check = [](const char* name, int64_t value) {
    if (value < 0) refuse(name, value, "0 or more");
  };
  check("request", scene.request);
  check("q_head", scene.q_head);
  check("q_len", scene.q_len);
  check("kv_len", scene.kv_len);
  // Lengths can be added to them.
  constexpr int64_t kMaxStart = std::numeric_limits<int64_t>::max() - std::numeric_limits<int32_t>::max();
  for (const auto& [name, start] : {std::pair{"query_start", scene.query_start}, {"key_start", scene.key_start}}) {
    check(name, start);
    if (start > kMaxStart) refuse(name, start, fmt::format("at most {}", kMaxStart));
  }
}

bool is_host_vector(const Tensor& values) {
  return values.rank == 1 && values.dtype == DType::i32 && values.device.kind == DeviceKind::cpu &&
         (values.stride[0] == 1 || values.shape[0] <= 1);
}

const int32_t* bind_operand(const OperandDeclaration& declaration, const MaskScene& scene) {
  const Extent extent = extent_of(declaration.scope, scene);
  const auto given = std::find_if(scene.operands.begin(), scene.operands.end(),
                                  [&](const MaskOperand& operand) { return operand.name == declaration.name; });
  const bool is_given = given != scene.operands.end();
  if (!is_given || !is_host_vector(given->values) || given->values.shape[0] < extent.end) {
    refuse(fmt::format("operand {}", declaration.name), is_given ? given->values.describe() : "nothing",
           fmt::format("i32[{}] or longer, contiguous, on the CPU: {}", extent.end, extent.meaning));
  }
  return static_cast<const int32_t*>(given->values.data) + extent.begin;
}

}  // namespace

ProgramInput bind_scene(const std::vector<OperandDeclaration>& operands, const MaskScene& scene) {
  check_scene(scene);
  ProgramInput input{scene.request, scene.q_len, scene.kv_len, {}};
  input.operand.reserve(operands.size());
  for (const OperandDeclaration& declaration : operands) input.operand.push_back(bind_operand(declaration, scene));
  return input;
}

}  // namespace qkv::mask
