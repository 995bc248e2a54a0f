// The replay as a whole, on a small trace made by hand.
#include "replay/replay.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>
#include <string>

#include "qkv/mask.hpp"
#include "qkv/status.hpp"
#include "replay/model.hpp"
#include "replay/model_run.hpp"
#include "replay/plot.hpp"

namespace qkv::replay {
namespace {

std::vector<TracedRequest> small_trace() {
  std::istringstream text(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n"
      "2023-11-16 18:00:00.0,30,4\n"
      "2023-11-16 18:00:00.1,5,9\n"
      "2023-11-16 18:00:00.1,50,2\n"
      "2023-11-16 18:00:07.5,12,3\n");
  return read_trace(text, "small");
}

ModelShape small_shape() {
  ModelShape shape;
  shape.num_layers = 3;
  shape.num_q_heads = 4;
  shape.num_kv_heads = 2;
  shape.head_dim = 16;
  shape.page_size = 8;
  return shape;
}

ReplayOptions small_options() {
  ReplayOptions options;
  options.limits = {3, 32, 8, 8};
  return options;
}

const StepSeconds kNoTime{};

TEST(Replay, runs_every_request_to_its_end_on_a_cpu) {
  const Model model = model_of(small_shape());
  const ReplayOptions options = small_options();
  ModelRun run(model, {options.limits.max_step_tokens, options.limits.num_pages, 2}, {});
  Report report({{"trace", "small"}}, options.limits.num_pages, 4);
  SchedulerCounts last;
  replay(
      small_trace(), model, options, [&](const Batch& batch) { return run.run(batch); },
      [&](const SchedulerCounts& counts) { last = counts; }, report);
  EXPECT_EQ(last.finished_requests, 4);
  EXPECT_EQ(last.generated_tokens, 4 + 9 + 2 + 3);
  EXPECT_EQ(last.computed_tokens - last.recomputed_tokens, 30 + 5 + 50 + 12 + 3 + 8 + 1 + 2);
  const auto json = report.json();
  EXPECT_GT(json["share"]["planning"], 0);
  EXPECT_GT(json["share"]["attention"], 0);
  EXPECT_LE(json["cache"]["most_use"], 1);
  const std::string path =
      (std::filesystem::temp_directory_path() / ("qkv_replay_" + std::to_string(getpid()) + ".png")).string();
  draw_report_png(report, path);
  EXPECT_GT(std::filesystem::file_size(path), 1000U);
  std::filesystem::remove(path);
}

TEST(Replay, at_the_pace_of_steps_requests_arrive_between_steps) {
  ReplayOptions options = small_options();
  options.limits.num_pages = 100;
  options.pace = Pace::steps;
  options.step_seconds = 0.06;
  std::vector<int64_t> requests;
  Report report({{"trace", "small"}}, options.limits.num_pages, 4);
  const auto run_step = [&](const Batch& batch) {
    requests.push_back(batch.seq_lens.shape[0]);
    return kNoTime;
  };
  replay(
      small_trace(), model_of(small_shape()), options, run_step, [](const SchedulerCounts&) {}, report);
  // At 0, 0.06 s and 0.12 s: the first request alone twice, then two more.
  ASSERT_GT(requests.size(), 6U);
  EXPECT_EQ(requests[0], 1);
  EXPECT_EQ(requests[1], 1);
  EXPECT_EQ(requests[2], 3);
  // The last one comes long after the others have gone.
  EXPECT_EQ(requests[requests.size() - 3], 1);
  EXPECT_EQ(report.json()["requests"]["finished"], 4);
}

TEST(Replay, at_the_traces_pace_it_waits_for_arrivals) {
  ReplayOptions options = small_options();
  options.pace = Pace::trace;
  options.speed = 100;  // 7.5 s in 75 ms
  Report report({{"trace", "small"}}, options.limits.num_pages, 4);
  replay(
      small_trace(), model_of(small_shape()), options, [](const Batch&) { return kNoTime; },
      [](const SchedulerCounts&) {}, report);
  const auto json = report.json();
  EXPECT_GT(json["seconds"]["elapsed"], 0.074);
  EXPECT_GT(json["seconds"]["idle"], 0.05);
  EXPECT_EQ(json["requests"]["finished"], 4);
}

TEST(Replay, stops_after_so_many_steps) {
  ReplayOptions options = small_options();
  options.max_steps = 2;
  Report report({{"trace", "small"}}, options.limits.num_pages, 4);
  replay(
      small_trace(), model_of(small_shape()), options, [](const Batch&) { return kNoTime; },
      [](const SchedulerCounts&) {}, report);
  EXPECT_EQ(report.num_steps(), 2);
  EXPECT_EQ(report.json()["requests"]["finished"], 0);
}

TEST(ModelRun, memory_is_counted_beforehand_and_refused_where_it_is_not_there) {
  const Model model = model_of(small_shape());
  const MemoryNeeds needs = memory_needs(model, {32, 100, 2});
  // 2 caches of 800 tokens, 2 heads, key and value of 16, 2 bytes
  EXPECT_EQ(needs.cache_bytes, 2 * 800 * 2 * 2 * 16 * 2);
  // query and output of 4 heads, key and value of 2
  EXPECT_EQ(needs.activation_bytes, 32 * (2 * 4 + 2 * 2) * 16 * 2);
  EXPECT_NO_THROW(check_memory(needs, {}));
  const MemoryNeeds absurd{int64_t{1} << 60, 0};
  EXPECT_THROW(check_memory(absurd, {}), Error);
}

TEST(ReplayModel, layers_of_a_config_come_with_their_windows) {
  const Model model = model_of(tools::read_model(std::string(QKV_MODELS) + "/gemma2.json", {.page_size = 32}));
  ASSERT_EQ(model.kinds.size(), 2U);
  EXPECT_EQ(model.kinds[0].window_tokens, 4096);
  EXPECT_EQ(model.kinds[1].window_tokens, 0);
  EXPECT_EQ(model.kinds[0].num_layers + model.kinds[1].num_layers, 42);
  EXPECT_EQ(model.kinds[0].spec.cache->page_size, 32);
  EXPECT_NE(model.name.find("gemma2: 21 layers of"), std::string::npos) << model.name;
}

TEST(ReplayModel, layers_without_a_paged_cache_are_refused) {
  try {
    model_of(tools::read_model(std::string(QKV_MODELS) + "/deepseek_v3.json", {}));
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "--model");
  }
}

// Each visible pair, counted one by one.
TEST(LayerWork, counts_what_the_mask_shows) {
  for (const int32_t window : {0, 1, 5, 64}) {
    ModelShape shape = small_shape();
    shape.window_tokens = window;
    const LayerKind kind = model_of(shape).kinds[0];
    for (const int32_t num_keys : {1, 4, 9, 30}) {
      for (const int32_t num_new : {1, num_keys / 2, num_keys}) {
        if (num_new < 1) continue;
        MaskScene scene;
        scene.q_len = num_new;
        scene.kv_len = num_keys;
        int64_t pairs = 0;
        int64_t keys = 0;
        for (int32_t key = 0; key < num_keys; ++key) {
          int64_t queries = 0;
          for (int32_t q = 0; q < num_new; ++q)
            queries += is_visible(kind.spec.effective_mask(), scene, q, key) ? 1 : 0;
          pairs += queries;
          keys += queries > 0 ? 1 : 0;
        }
        const LayerWork work = work_of(kind, num_new, num_keys);
        EXPECT_EQ(work.operations, 2 * pairs * 4 * 32) << window << " " << num_new << " of " << num_keys;
        const int64_t token = 2 * 32 * 2;  // bytes of a token's key and value
        EXPECT_EQ(work.bytes, keys * token + num_new * (2 * token + 4 * 32 * 2));
      }
    }
  }
}

}  // namespace
}  // namespace qkv::replay
