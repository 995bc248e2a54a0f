#include "cuda/kernel_key.hpp"

#include <fmt/format.h>

#include "core/checks.hpp"
#include "core/eight_bit.hpp"
#include "cuda/device/params.hpp"
#include "cuda/device_text.hpp"
#include "mask/emit.hpp"

namespace qkv::cuda {
namespace {

int scope_code(OperandScope scope) {
  switch (scope) {
    case OperandScope::request:
      return 0;
    case OperandScope::query:
    case OperandScope::new_key:
      return 1;
    case OperandScope::key:
      return 2;
  }
  return 0;
}

std::string scopes_text(const mask::Program& program) {
  std::string text;
  for (const OperandDeclaration& operand : program.operands) text += fmt::format("{}, ", scope_code(operand.scope));
  return text + "0";  // device code has no empty arrays
}

std::string own_constants_text(const ForwardKey& key) {
  std::string text;
  for (const auto& [name, value] : key.constants) text += fmt::format("constexpr int {} = {};\n", name, value);
  return text;
}

std::string constants_text(const LayerSpec& layer, const ForwardKey& key, const mask::Program& program) {
  const bool alibi = layer.alibi_per_request || !layer.alibi_slopes.empty();
  const bool always_visible = program.code.back().opcode == mask::Opcode::truth && program.code.back().constant != 0;
  return fmt::format(
      "namespace qkv::cuda::key {{\n"
      "constexpr bool is_bf16 = {};\n"
      "constexpr int query_dtype = {}, kv_dtype = {}, out_dtype = {};\n"
      "constexpr bool token_scales = {}, group_scales = {};\n"
      "constexpr int head_dim = {}, head_dim_v = {}, group_size = {};\n"
      "constexpr int page_size = {};\n"
      "constexpr int key_run = {}, num_ranks = {}, interleave_size = {};\n"
      "constexpr bool softcap = {}, alibi = {};\n"
      "constexpr bool mask = {}, mask_by_head = {};\n"
      "constexpr int num_mask_operands = {};\n"
      "constexpr int mask_scope[] = {{{}}};\n"
      "constexpr int tile_q = {}, tile_kv = {};\n"
      "constexpr bool positive_factor = {};\n"
      "{}"
      "}}\n",
      layer.query_dtype == DType::bf16, dtype_code(layer.query_dtype), dtype_code(layer.kv_dtype),
      dtype_code(layer.out_dtype()), has_token_scales(layer), layer.output_scales == OutputScales::per_token_group,
      layer.head_dim, layer.value_dim(), layer.group_size(), layer.cache ? layer.cache->page_size : 0,
      static_cast<int>(layer.key_run), layer.shard.num_ranks, layer.shard.interleave_size, layer.softcap > 0, alibi,
      !always_visible, program.depends_on_head, program.operands.size(), scopes_text(program), key.tile_q, key.tile_kv,
      layer.effective_scale() > 0, own_constants_text(key));
}

std::string name_in_words(const LayerSpec& layer, const ForwardKey& key) {
  std::string name = fmt::format("{} {} {}->{} d{}/{} group {}", key.kernel, key.arch, to_string(layer.query_dtype),
                                 to_string(layer.out_dtype()), layer.head_dim, layer.value_dim(), layer.group_size());
  name += layer.cache ? fmt::format(" page {}", layer.cache->page_size) : " dense";
  if (is_8bit(layer.kv_dtype)) {
    name += fmt::format(" {} scales {}", to_string(layer.kv_dtype), to_string(layer.kv_scales));
  }
  if (layer.output_scales == OutputScales::per_token_group) name += " output scales per_token_group";
  if (layer.key_run != KeyRun::all) name += fmt::format(" keys {}", to_string(layer.key_run));
  if (layer.shard.num_ranks > 1)
    name += fmt::format(" ranks {} by {}", layer.shard.num_ranks, layer.shard.interleave_size);
  if (layer.softcap > 0) name += " softcap";
  if (layer.alibi_per_request || !layer.alibi_slopes.empty()) name += " alibi";
  name += fmt::format(" tile {}x{}", key.tile_q, key.tile_kv);
  for (const auto& [constant, value] : key.constants) name += fmt::format(" {} {}", constant, value);
  return name + fmt::format(" mask {}", layer.effective_mask().text());
}

}  // namespace

int dtype_code(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return 0;
    case DType::f16:
      return 1;
    case DType::bf16:
      return 2;
    case DType::f8e4m3:
      return 3;
    case DType::f8e5m2:
      return 4;
    case DType::i8:
      return 5;
    default:
      refuse("dtype", to_string(dtype), "a format of queries, keys, values or outputs", ErrorCode::internal);
  }
}

bool has_token_scales(const LayerSpec& layer) { return layer.kv_scales == KvScales::per_token_head; }

jit::Source forward_source(const LayerSpec& layer, const ForwardKey& key) {
  const mask::Program program = mask::compile(layer.effective_mask());
  jit::Source source;
  source.name = name_in_words(layer, key);
  source.text = constants_text(layer, key, program) + "#include \"mask_tile.cuh\"\nnamespace qkv::cuda {\n" +
                mask::emit_cuda(program) + mask::emit_tile_class_cuda(program) + "}\n" +
                fmt::format("#include \"{}.cuh\"\n", key.kernel);
  source.headers = device_headers();
  source.arch = key.arch;
  return source;
}

jit::Source plain_source(const char* kernel, const std::string& arch) {
  jit::Source source;
  source.name = fmt::format("{} {}", kernel, arch);
  source.text = fmt::format("#include \"{}.cuh\"\n", kernel);
  source.headers = device_headers();
  source.arch = arch;
  return source;
}

jit::Source cache_write_source(KvScales scales, const std::string& arch) {
  return plain_source(scales == KvScales::none ? "cache_write" : "cache_quantise", arch);
}

}  // namespace qkv::cuda
