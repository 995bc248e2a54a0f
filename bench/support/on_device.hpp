// Memory and clock of one device, the CPU or a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

#include "cuda/memory.hpp"
#include "jit/cuda_api.hpp"
#include "qkv/cuda.hpp"
#include "qkv/qkv.hpp"

namespace qkv::bench {

// A tensor of small random numbers.
class Buffer {
 public:
  Buffer(Device device, DType dtype, std::initializer_list<int64_t> shape);
  const Tensor& view() const { return layout_; }

 private:
  Tensor layout_;
  std::vector<std::byte> host_;
  DeviceMemory memory_;
};

// Calls on a stream of its own, timed. On a GPU its context is the thread's meanwhile.
class Clock {
 public:
  Clock(Device device, double seconds);
  ~Clock();
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

  Stream stream() const { return {stream_}; }
  Stream side_stream() const { return {side_stream_}; }

  // Median seconds of a call.
  double median(const std::function<void()>& call, int32_t num_calls) const;

  // The same of calls that are captured together, the i-th with its number; each has run before.
  double median_in_graph(const std::function<void(int32_t)>& call, int32_t num_calls) const;

  // How many calls of that length fill the time.
  int32_t calls_for(double seconds_of_call) const;

 private:
  void wait() const;

  double seconds_;
  std::optional<cuda::CurrentDevice> current_;
  jit::CUstream stream_ = nullptr, side_stream_ = nullptr;
};

}  // namespace qkv::bench
