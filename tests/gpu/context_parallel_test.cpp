// Layers over several ranks on a GPU: ranks as threads that share it, and a communicator of NCCL, whose steps are
// captured and replayed with other batches.
#include "qkv/context_parallel.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "jit/driver.hpp"
#include "parallel/nccl_library.hpp"
#include "parallel_cases.hpp"
#include "qkv/compile.hpp"
#include "qkv/cuda.hpp"
#include "support/owned_stream.hpp"
#include "support/rank_threads.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using tools::OwnedTensor;
using tools::Placed;

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_context_parallel : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

std::string place_of(const tools::ParallelCase& c) {
  return tools::describe(c) + "\nqkv check --device cuda --ranks " + std::to_string(c.num_ranks) + " --seed " +
         std::to_string(c.attention.seed) + " --first " + std::to_string(c.attention.index) + " --cases 1";
}

TEST_F(gpu_context_parallel, threads_equal_the_definition_over_random_features) {
  for (const int32_t num_ranks : {1, 2, 3, 4, 8}) {
    for (int64_t index = 0; index < 50; ++index) {
      const tools::ParallelCase c = tools::draw_parallel_case(31, index, num_ranks, DeviceKind::cuda);
      EXPECT_EQ(tools::failure_of(c, kGpu), "") << place_of(c);
    }
  }
}

TEST_F(gpu_context_parallel, one_rank_of_nccl_equals_the_definition) {
  if (!parallel::probe_nccl().usable) GTEST_SKIP() << "needs NCCL";
  const std::vector<std::shared_ptr<Collectives>> ranks = {nccl_ranks(nccl_unique_id(), 1, 0, 0)};
  for (int64_t index = 0; index < 50; ++index) {
    const tools::ParallelCase c = tools::draw_parallel_case(33, index, 1, DeviceKind::cuda);
    EXPECT_EQ(tools::failure_of(c, ranks), "") << place_of(c);
  }
}

// By itself when it is made, or by its ranks' layers before.
TEST_F(gpu_context_parallel, warmed_threads_meet_no_batch_that_needs_the_compiler) {
  LayerSpec layer = testing::layer_of(8, 2, 64);
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.cache = CacheSpec{16};
  warmup(rank_layers({layer}, 0, 2));
  const int64_t before = num_compiles();
  for (int64_t index = 0; index < 30; ++index) {
    tools::ParallelCase c;  // without a planner, whose kernels are compiled when it is made
    c.attention.layer = layer;
    c.attention.requests = tools::draw_parallel_case(35, index, 2, DeviceKind::cuda).attention.requests;
    c.num_ranks = 2;
    EXPECT_EQ(tools::failure_of(c, kGpu), "") << place_of(c);
    ASSERT_EQ(num_compiles(), before) << index;
  }
  test::on_each_rank(in_process_ranks(2, kGpu), [&](const std::shared_ptr<Collectives>& ranks) {
    const ContextParallel warm({layer}, ranks, RequestBounds{});
  });
  EXPECT_EQ(num_compiles(), before);
}

// A decode step of up to four requests, captured at its first batch; the new tokens run beside the exchange.
class CapturedStep {
 public:
  static constexpr int32_t kRequests = 4, kPages = 64, kWidth = 16;

  explicit CapturedStep(const ContextParallel& layer)
      : layer_(layer),
        planner_(layer.planner(limits())),
        pages_(random({kPages, 16, 2, 64}, 1)),
        query_(random({kRequests, 8, 64}, 2)),
        key_(random({kRequests, 2, 64}, 3)) {
    for (int32_t page = 0; page < kPages; ++page) table_.push_back(page);
  }
  ~CapturedStep() { jit::driver().graph_exec_destroy(graph_); }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;

  // The bits of the requests' rows: by a replay, and eagerly.
  std::pair<std::vector<std::byte>, std::vector<std::byte>> run(const std::vector<int32_t>& seq_lens) {
    std::vector<int32_t> starts = {0};
    for (const int32_t length : seq_lens) starts.push_back(starts.back() + (length > 0 ? 1 : 0));
    Batch batch;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(seq_lens);
    batch.block_table = Tensor::of(table_, {kRequests, kWidth}).slice(0, 0, static_cast<int64_t>(seq_lens.size()));
    const ContextParallelPlan plan = planner_.plan(batch, stream_.stream());
    if (workspace_.view().num_elements() == 0) workspace_ = OwnedTensor(DType::i32, {plan.workspace_bytes() / 4});
    std::vector<std::byte> replayed = bytes_of(plan, starts.back(), true);
    return {std::move(replayed), bytes_of(plan, starts.back(), false)};
  }

 private:
  static PlanLimits limits() {
    PlanLimits limits;
    limits.max_requests = limits.max_tokens = kRequests;
    limits.max_query_len = 1;
    limits.max_seq_len = 16 * kWidth;
    limits.num_pages = kPages;
    return limits;
  }

  static OwnedTensor random(std::initializer_list<int64_t> shape, int64_t seed) {
    OwnedTensor tensor(DType::bf16, shape);
    tools::Draw draw(7, seed);
    const Tensor flat = Tensor::contiguous(tensor.view().data, DType::bf16, {tensor.view().num_elements()});
    for (int64_t i = 0; i < flat.shape[0]; ++i) tools::store(flat, {i}, draw.normal());
    return tensor;
  }

  std::vector<std::byte> bytes_of(const ContextParallelPlan& plan, int64_t num_tokens, bool replay) {
    if (!out_) {
      placed_.emplace(Memory{Placed(pages_, kGpu), Placed(query_, kGpu), Placed(key_, kGpu), Placed(workspace_, kGpu)});
      out_.emplace(out_memory_, kGpu);
    }
    const auto forward = [&] {
      const Tensor pages = placed_->pages.view();
      layer_.forward(placed_->query.view(), placed_->key.view(), placed_->key.view(), {pages, pages}, plan,
                     placed_->workspace.view(), out_->view(), {}, stream_.stream(), {}, beside_.stream());
    };
    if (!replay) {
      forward();
    } else {
      if (graph_ == nullptr) {
        forward();  // NCCL sets its connections up in the first call
        jit::check(jit::driver().stream_synchronize(stream_.handle), "cuStreamSynchronize");
        graph_ = testing::captured(stream_.handle, forward);
      }
      jit::check(jit::driver().graph_launch(graph_, stream_.handle), "cuGraphLaunch");
    }
    jit::check(jit::driver().stream_synchronize(stream_.handle), "cuStreamSynchronize");
    out_->fetch();
    const auto* first = static_cast<const std::byte*>(out_memory_.view().data);
    return {first, first + num_tokens * 8 * 64 * 2};
  }

  struct Memory {
    Placed pages, query, key, workspace;
  };

  const ContextParallel& layer_;
  ContextParallelPlanner planner_;
  OwnedTensor pages_, query_, key_, workspace_;
  OwnedTensor out_memory_{DType::bf16, {kRequests, 8, 64}};
  std::optional<Memory> placed_;
  std::optional<Placed> out_;
  std::vector<int32_t> table_;
  testing::OwnedStream stream_, beside_;
  jit::CUgraphExec graph_ = nullptr;
};

TEST_F(gpu_context_parallel, one_captured_step_serves_every_batch) {
  if (!parallel::probe_nccl().usable) GTEST_SKIP() << "needs NCCL";
  const std::shared_ptr<Collectives> ranks = nccl_ranks(nccl_unique_id(), 1, 0, 0);
  for (const StateExchange exchange :
       {StateExchange::all_to_all, StateExchange::reduce_scatter, StateExchange::all_gather}) {
    LayerSpec spec = testing::layer_of(8, 2, 64);
    spec.query_dtype = spec.kv_dtype = DType::bf16;
    spec.cache = CacheSpec{16};
    const ContextParallel layer({spec, 1, exchange}, ranks);
    CapturedStep step(layer);
    for (const std::vector<int32_t>& seq_lens :
         std::vector<std::vector<int32_t>>{{40, 256, 1, 17}, {1, 1, 1, 1}, {256}, {3, 200, 99}, {16, 255, 31, 2}}) {
      const auto [replayed, eager] = step.run(seq_lens);
      EXPECT_EQ(replayed, eager) << to_string(exchange);
    }
  }
}

}  // namespace
}  // namespace qkv
