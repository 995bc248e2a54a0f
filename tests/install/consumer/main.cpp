#include <cstdio>
#include <qkv/qkv.hpp>

int main() {
  const qkv::Mask mask = qkv::parse_mask("causal & window(127, 0)");
  const qkv::LayerSpec layer{.num_q_heads = 8, .num_kv_heads = 2, .head_dim = 64, .mask = mask};
  std::printf("qkv %s, reasons against the layer: %zu\n", qkv::version().c_str(), qkv::explain(layer).size());
  return qkv::explain(layer).empty() ? 0 : 1;
}
