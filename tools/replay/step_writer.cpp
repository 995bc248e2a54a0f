#include "step_writer.hpp"

#include <algorithm>
#include <span>
#include <vector>

namespace qkv::replay {

nlohmann::ordered_json step_file_setting(const Model& model, const RunSizes& sizes) {
  nlohmann::ordered_json kinds = nlohmann::ordered_json::array();
  for (const LayerKind& kind : model.kinds) {
    const LayerSpec& spec = kind.spec;
    kinds.push_back({{"layers", kind.num_layers},
                     {"caches", std::min(kind.num_layers, sizes.max_caches)},
                     {"heads", spec.num_q_heads},
                     {"kv_heads", spec.num_kv_heads},
                     {"head_dim", spec.head_dim},
                     {"head_dim_v", spec.value_dim()},
                     {"dtype", to_string(spec.kv_dtype)},
                     {"window", kind.window_tokens}});
  }
  return {{"model", model.name},
          {"page_size", model.kinds.front().spec.cache->page_size},
          {"pages", sizes.num_pages},
          {"max_step_tokens", sizes.max_step_tokens},
          {"kinds", kinds}};
}

StepWriter::StepWriter(std::ostream& file, const nlohmann::ordered_json& setting) : file_(file) {
  file_ << setting.dump() << '\n';
}

void StepWriter::write(const Batch& batch) {
  const auto num_requests = static_cast<size_t>(batch.seq_lens.shape[0]);
  const std::span starts(static_cast<const int32_t*>(batch.query_start_loc.data), num_requests + 1);
  const std::span keys(static_cast<const int32_t*>(batch.seq_lens.data), num_requests);
  std::vector<int32_t> num_new(num_requests);
  for (size_t r = 0; r < num_requests; ++r) num_new[r] = starts[r + 1] - starts[r];
  file_ << nlohmann::ordered_json{{"new", num_new}, {"keys", keys}}.dump() << '\n';
}

}  // namespace qkv::replay
