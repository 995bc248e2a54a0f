// The steps of a replay as a file: other attention engines run the same batches from it (bench/replay_peer.py).
//
// JSON, a document a line. The first is the setting: page size, pages, the largest step, and of each kind of layer its
// heads, sizes, dtype, window, layers and caches. Each line after it is a step: "new", the new tokens of each of its
// requests, and "keys", how many keys each then has.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>

#include "model.hpp"
#include "model_run.hpp"
#include "qkv/batch.hpp"

namespace qkv::replay {

nlohmann::ordered_json step_file_setting(const Model& model, const RunSizes& sizes);

class StepWriter {
 public:
  // `file` outlives the writer.
  StepWriter(std::ostream& file, const nlohmann::ordered_json& setting);
  void write(const Batch& batch);

 private:
  std::ostream& file_;
};

}  // namespace qkv::replay
