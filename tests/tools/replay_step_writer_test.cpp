// The file of a replay's steps, which other engines run again.
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "replay/step_batch.hpp"
#include "replay/step_writer.hpp"

namespace qkv::replay {
namespace {

Model two_kinds() {
  ModelShape shape;
  shape.num_layers = 3;
  Model model = model_of(shape);
  shape.window_tokens = 512;
  shape.head_dim_v = 64;
  model.kinds.push_back(model_of(shape).kinds.front());
  return model;
}

TEST(ReplayStepWriter, the_setting_says_what_another_engine_has_to_make) {
  std::ostringstream file;
  const StepWriter writer(file, step_file_setting(two_kinds(), {2048, 4096, 2}));
  const auto setting = nlohmann::json::parse(file.str());
  EXPECT_EQ(setting["page_size"], 16);
  EXPECT_EQ(setting["pages"], 4096);
  EXPECT_EQ(setting["max_step_tokens"], 2048);
  ASSERT_EQ(setting["kinds"].size(), 2U);
  EXPECT_EQ(setting["kinds"][0],
            nlohmann::json::parse(R"({"layers": 3, "caches": 2, "heads": 32, "kv_heads": 8, "head_dim": 128,
                                      "head_dim_v": 128, "dtype": "bf16", "window": 0})"));
  EXPECT_EQ(setting["kinds"][1]["window"], 512);
  EXPECT_EQ(setting["kinds"][1]["head_dim_v"], 64);
}

TEST(ReplayStepWriter, a_line_a_step_holds_new_tokens_and_keys_of_each_request) {
  std::ostringstream file;
  StepWriter writer(file, step_file_setting(two_kinds(), {64, 8, 1}));
  StepBatch batch(3, 64, 4, 16);
  const std::vector<int32_t> pages = {5, 1, 0, 7};
  batch.fill(std::vector<StepRequest>{{20, 53, pages}, {1, 9, pages}});
  writer.write(batch.batch());
  batch.fill(std::vector<StepRequest>{{1, 54, pages}, {1, 10, pages}, {30, 30, pages}});
  writer.write(batch.batch());
  std::istringstream lines(file.str());
  std::string line;
  std::getline(lines, line);
  std::getline(lines, line);
  EXPECT_EQ(line, R"({"new":[20,1],"keys":[53,9]})");
  std::getline(lines, line);
  EXPECT_EQ(line, R"({"new":[1,1,30],"keys":[54,10,30]})");
  EXPECT_FALSE(std::getline(lines, line));
}

}  // namespace
}  // namespace qkv::replay
