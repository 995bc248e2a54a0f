// Ranks that share a GPU, each with a stream. A rank's copies wait, on its stream, for the event that says that the
// sender's rows are there; and what a rank does next waits for the events that say that all have read its rows.
#include <fmt/format.h>

#include <string>

#include "core/checks.hpp"
#include "cuda/memory.hpp"
#include "jit/driver.hpp"
#include "parallel/rows.hpp"

namespace qkv::parallel {
namespace {

struct Events {
  std::vector<jit::CUevent> ready;  // [num_ranks]: the rank's rows are written
  std::vector<jit::CUevent> read;   // [num_ranks]: the rank has read what the others sent
  int32_t device_index;

  Events(int32_t num_ranks, int32_t index)
      : ready(static_cast<size_t>(num_ranks)), read(static_cast<size_t>(num_ranks)), device_index(index) {
    const cuda::CurrentDevice current(device_index);
    for (auto* events : {&ready, &read}) {
      for (jit::CUevent& event : *events) {
        jit::check(jit::driver().event_create(&event, jit::kEventDisableTiming), "cuEventCreate");
      }
    }
  }
  ~Events() {
    for (auto* events : {&ready, &read}) {
      for (const jit::CUevent event : *events) jit::driver().event_destroy(event);
    }
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
};

jit::CUstream handle_of(Stream stream) { return static_cast<jit::CUstream>(stream.handle); }

void refuse_capture(Stream stream) {
  auto status = jit::CUstreamCaptureStatus::none;
  jit::check(jit::driver().stream_is_capturing(handle_of(stream), &status), "cuStreamIsCapturing");
  if (status == jit::CUstreamCaptureStatus::none) return;
  refuse("stream", "a stream that is being captured",
         "a stream outside of capture: in_process_ranks wait for each other on the host; nccl_ranks can be captured",
         ErrorCode::unsupported);
}

void wait_for(const std::vector<jit::CUevent>& events, Stream stream) {
  for (const jit::CUevent event : events) {
    jit::check(jit::driver().stream_wait_event(handle_of(stream), event, 0), "cuStreamWaitEvent");
  }
}

jit::CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<jit::CUdeviceptr>(pointer); }

class CudaRowMover : public RowMover {
 public:
  CudaRowMover(std::shared_ptr<const Events> events, size_t rank) : events_(std::move(events)), rank_(rank) {}

  void prepare(Stream stream) override {
    const cuda::CurrentDevice current(events_->device_index);
    refuse_capture(stream);
    jit::check(jit::driver().event_record(events_->ready[rank_], handle_of(stream)), "cuEventRecord");
  }

  void gather(const Rows& rows, std::byte* receive, int64_t row_bytes, Stream stream) override {
    const cuda::CurrentDevice current(events_->device_index);
    const auto bytes = static_cast<size_t>(row_bytes);
    wait_for(events_->ready, stream);
    for (size_t i = 0; i < rows.size(); ++i) {
      jit::check(jit::driver().memcpy_dtod_async(address_of(receive + i * bytes), address_of(rows[i]), bytes,
                                                 handle_of(stream)),
                 "cuMemcpyDtoDAsync");
    }
    jit::check(jit::driver().event_record(events_->read[rank_], handle_of(stream)), "cuEventRecord");
  }

  // Through the host: these ranks are for tests, which do not warrant a kernel.
  void sum(const Rows& rows, float* receive, int64_t row_elements, Stream stream) override {
    const cuda::CurrentDevice current(events_->device_index);
    const auto elements = static_cast<size_t>(row_elements);
    std::vector<float> copies(rows.size() * elements);
    Rows on_host;
    wait_for(events_->ready, stream);
    for (size_t i = 0; i < rows.size(); ++i) {
      float* copy = copies.data() + i * elements;
      on_host.push_back(reinterpret_cast<const std::byte*>(copy));
      jit::check(
          jit::driver().memcpy_dtoh_async(copy, address_of(rows[i]), elements * sizeof(float), handle_of(stream)),
          "cuMemcpyDtoHAsync");
    }
    jit::check(jit::driver().event_record(events_->read[rank_], handle_of(stream)), "cuEventRecord");
    jit::check(jit::driver().stream_synchronize(handle_of(stream)), "cuStreamSynchronize");
    std::vector<float> total(elements);
    sum_rows(on_host, total.data(), row_elements);
    jit::check(
        jit::driver().memcpy_htod_async(address_of(receive), total.data(), elements * sizeof(float), handle_of(stream)),
        "cuMemcpyHtoDAsync");
    jit::check(jit::driver().stream_synchronize(handle_of(stream)), "cuStreamSynchronize");  // before `total` ends
  }

  void release(Stream stream) override {
    const cuda::CurrentDevice current(events_->device_index);
    wait_for(events_->read, stream);
  }

 private:
  std::shared_ptr<const Events> events_;
  size_t rank_;
};

}  // namespace

std::vector<std::unique_ptr<RowMover>> cuda_row_movers(int32_t num_ranks, int32_t device_index) {
  const auto events = std::make_shared<const Events>(num_ranks, device_index);
  std::vector<std::unique_ptr<RowMover>> movers;
  movers.reserve(static_cast<size_t>(num_ranks));
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    movers.push_back(std::make_unique<CudaRowMover>(events, static_cast<size_t>(rank)));
  }
  return movers;
}

}  // namespace qkv::parallel
