#include "bench/support/on_device.hpp"

#include <algorithm>
#include <chrono>

#include "bench/support/workload.hpp"
#include "jit/driver.hpp"

namespace qkv::bench {

Buffer::Buffer(Device device, DType dtype, std::initializer_list<int64_t> shape)
    : layout_(Tensor::contiguous(nullptr, dtype, shape, device)) {
  std::vector<std::byte> bytes = random_values(layout_.num_elements(), dtype);
  if (device.kind == DeviceKind::cpu) {
    host_ = std::move(bytes);
    layout_.data = host_.data();
    return;
  }
  memory_ = DeviceMemory(device, static_cast<int64_t>(bytes.size()));
  memory_.copy_from_host(bytes.data());
  layout_.data = memory_.data();
}

Clock::Clock(Device device, double seconds) : seconds_(seconds) {
  if (device.kind == DeviceKind::cpu) return;
  current_.emplace(device.index);
  for (jit::CUstream* stream : {&stream_, &side_stream_}) {
    jit::check(jit::driver().stream_create(stream, jit::kStreamNonBlocking), "cuStreamCreate");
  }
}

Clock::~Clock() {
  if (stream_ == nullptr) return;
  jit::driver().stream_destroy(stream_);
  jit::driver().stream_destroy(side_stream_);
}

double Clock::median(const std::function<void()>& call, int32_t num_calls) const {
  constexpr int32_t kRounds = 7;
  std::vector<double> rounds;
  for (int32_t round = 0; round < kRounds; ++round) {
    wait();
    const auto began = std::chrono::steady_clock::now();
    for (int32_t i = 0; i < num_calls; ++i) call();
    wait();
    rounds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / num_calls);
  }
  std::sort(rounds.begin(), rounds.end());
  return rounds[kRounds / 2];
}

double Clock::median_in_graph(const std::function<void(int32_t)>& call, int32_t num_calls) const {
  const jit::Driver& driver = jit::driver();
  jit::CUgraph graph = nullptr;
  jit::CUgraphExec replay = nullptr;
  jit::check(driver.stream_begin_capture(stream_, jit::CUstreamCaptureMode::this_thread), "cuStreamBeginCapture");
  for (int32_t i = 0; i < num_calls; ++i) call(i);
  jit::check(driver.stream_end_capture(stream_, &graph), "cuStreamEndCapture");
  jit::check(driver.graph_instantiate(&replay, graph, 0), "cuGraphInstantiate");
  driver.graph_destroy(graph);
  const double seconds = median([&] { jit::check(driver.graph_launch(replay, stream_), "cuGraphLaunch"); }, 5);
  driver.graph_exec_destroy(replay);
  return seconds / num_calls;
}

int32_t Clock::calls_for(double seconds_of_call) const {
  return static_cast<int32_t>(std::clamp(seconds_ / 7 / std::max(seconds_of_call, 1e-6), 3.0, 2000.0));
}

void Clock::wait() const {
  if (stream_ != nullptr) jit::check(jit::driver().stream_synchronize(stream_), "cuStreamSynchronize");
}

}  // namespace qkv::bench
