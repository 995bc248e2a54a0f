// Ranks on a GPU: threads that share it, each with its stream, and an NCCL communicator of one rank. Nothing waits for
// the device between the exchanges, so that a copy that is not ordered after its sender's work reads the wrong bytes.
#include "qkv/collectives.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "jit/driver.hpp"
#include "parallel/nccl_library.hpp"
#include "qkv/cuda.hpp"
#include "qkv/status.hpp"
#include "support/owned_stream.hpp"
#include "support/rank_threads.hpp"

namespace qkv {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr int64_t kRow = 1 << 16;  // floats
constexpr int32_t kNumSteps = 12;

class gpu_collectives : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

jit::CUdeviceptr address_of(const DeviceMemory& memory, int64_t float_offset = 0) {
  return reinterpret_cast<jit::CUdeviceptr>(static_cast<float*>(memory.data()) + float_offset);
}

Tensor floats(const DeviceMemory& memory, int64_t float_offset, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(static_cast<float*>(memory.data()) + float_offset, DType::f32, shape, kGpu);
}

// Rows of one value each: what `from` sends to `to` in a step.
float value_of(int32_t step, int32_t from, int32_t to) { return static_cast<float>(step * 10000 + from * 100 + to); }

// One rank's memory: rows to send, which every step overwrites, and rows received, which every step leaves.
struct RankMemory {
  RankMemory(int32_t num_ranks, int32_t num_steps)
      : n(num_ranks), send(kGpu, n * kRow * 4), received(kGpu, num_steps * n * kRow * 4), delay(kGpu, 64 << 20) {}

  int64_t n;
  DeviceMemory send, received, delay;
  testing::OwnedStream own;

  // The rows are written late on the stream, so that whoever does not wait comes too early.
  void write_rows(int32_t step, int32_t rank) {
    if ((step + rank) % 2 == 0) {
      jit::check(jit::driver().memset_d8_async(address_of(delay), 0, 64 << 20, own.handle), "cuMemsetD8Async");
    }
    for (int32_t to = 0; to < n; ++to) {
      const float value = value_of(step, rank, to);
      unsigned bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      jit::check(jit::driver().memset_d32_async(address_of(send, to * kRow), bits, kRow, own.handle),
                 "cuMemsetD32Async");
    }
  }
  std::vector<float> download() const {
    std::vector<float> values(static_cast<size_t>(received.num_bytes()) / 4);
    received.copy_to_host(values.data(), own.stream());
    return values;
  }
};

// All values of a row are the same one, or the first that is not.
float value_of_row(const std::vector<float>& values, int64_t row, float expected) {
  for (int64_t i = row * kRow; i < (row + 1) * kRow; ++i) {
    if (values[static_cast<size_t>(i)] != expected) return values[static_cast<size_t>(i)];
  }
  return expected;
}

void run_on_each(int32_t num_ranks, const std::function<void(Collectives&)>& body) {
  test::on_each_rank(in_process_ranks(num_ranks, kGpu),
                     [&](const std::shared_ptr<Collectives>& own) { EXPECT_NO_THROW(body(*own)); });
}

TEST_F(gpu_collectives, rows_of_threads_are_read_when_written_and_overwritten_when_read) {
  run_on_each(3, [](Collectives& ranks) {
    const int32_t n = ranks.num_ranks();
    RankMemory memory(n, kNumSteps);
    for (int32_t step = 0; step < kNumSteps; ++step) {
      memory.write_rows(step, ranks.rank());
      const int64_t place = step * n * kRow;
      if (step % 2 == 0) {
        ranks.all_to_all(floats(memory.send, 0, {n, kRow}), floats(memory.received, place, {n, kRow}),
                         memory.own.stream());
      } else {
        ranks.all_gather(floats(memory.send, kRow, {kRow}), floats(memory.received, place, {n, kRow}),
                         memory.own.stream());
      }
    }
    const std::vector<float> values = memory.download();
    for (int32_t step = 0; step < kNumSteps; ++step) {
      for (int32_t from = 0; from < n; ++from) {
        const float expected = value_of(step, from, step % 2 == 0 ? ranks.rank() : 1);
        EXPECT_EQ(value_of_row(values, step * n + from, expected), expected) << "step " << step << " from " << from;
      }
    }
  });
}

TEST_F(gpu_collectives, sums_of_threads_are_in_the_order_of_ranks) {
  run_on_each(3, [](Collectives& ranks) {
    const int32_t n = ranks.num_ranks();
    RankMemory memory(n, kNumSteps);
    for (int32_t step = 0; step < kNumSteps; ++step) {
      memory.write_rows(step, ranks.rank());
      ranks.reduce_scatter(floats(memory.send, 0, {n, kRow}), floats(memory.received, step * n * kRow, {kRow}),
                           memory.own.stream());
    }
    const std::vector<float> values = memory.download();
    for (int32_t step = 0; step < kNumSteps; ++step) {
      float sum = value_of(step, 0, ranks.rank());
      for (int32_t from = 1; from < n; ++from) sum += value_of(step, from, ranks.rank());
      EXPECT_EQ(value_of_row(values, step * n, sum), sum) << "step " << step;
    }
  });
}

TEST_F(gpu_collectives, threads_refuse_a_stream_that_is_captured) {
  const auto ranks = in_process_ranks(1, kGpu);
  RankMemory memory(1, 1);
  jit::check(jit::driver().stream_begin_capture(memory.own.handle, jit::CUstreamCaptureMode::relaxed), "capture");
  try {
    ranks[0]->all_gather(floats(memory.send, 0, {kRow}), floats(memory.received, 0, {1, kRow}), memory.own.stream());
    ADD_FAILURE() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_EQ(error.argument(), "stream");
  }
  jit::CUgraph graph = nullptr;
  jit::check(jit::driver().stream_end_capture(memory.own.handle, &graph), "cuStreamEndCapture");
  jit::driver().graph_destroy(graph);
}

TEST_F(gpu_collectives, one_rank_of_nccl_exchanges_with_itself_in_a_graph) {
  if (!parallel::probe_nccl().usable) GTEST_SKIP() << "needs NCCL";
  const auto ranks = nccl_ranks(nccl_unique_id(), 1, 0, 0);
  RankMemory memory(1, 3);
  const auto exchange = [&](int64_t row) { return floats(memory.received, row * kRow, {1, kRow}); };
  const auto run = [&] {
    memory.write_rows(0, 0);
    ranks->all_gather(floats(memory.send, 0, {kRow}), exchange(0), memory.own.stream());
    ranks->all_to_all(floats(memory.send, 0, {1, kRow}), exchange(1), memory.own.stream());
    ranks->reduce_scatter(floats(memory.send, 0, {1, kRow}), floats(memory.received, 2 * kRow, {kRow}),
                          memory.own.stream());
  };
  run();  // NCCL sets its connections up in the first call
  jit::check(jit::driver().stream_synchronize(memory.own.handle), "cuStreamSynchronize");
  const std::vector<float> nothing(static_cast<size_t>(memory.received.num_bytes()) / 4, -1.0f);
  memory.received.copy_from_host(nothing.data(), memory.own.stream());

  const jit::CUgraphExec replay = testing::captured(memory.own.handle, run);
  jit::check(jit::driver().graph_launch(replay, memory.own.handle), "cuGraphLaunch");
  const std::vector<float> values = memory.download();
  for (int64_t row = 0; row < 3; ++row) EXPECT_EQ(value_of_row(values, row, value_of(0, 0, 0)), value_of(0, 0, 0));
  EXPECT_NO_THROW(ranks->check());
  jit::driver().graph_exec_destroy(replay);
}

}  // namespace
}  // namespace qkv
