// GPUs, one a rank. NCCL puts the work on the stream, where a CUDA graph can capture it.
#include <fmt/format.h>

#include <cstring>
#include <thread>

#include "core/checks.hpp"
#include "cuda/memory.hpp"
#include "parallel/failures.hpp"
#include "parallel/nccl_rank.hpp"

namespace qkv {
namespace parallel {
namespace {

constexpr const char* kMore = "ncclSuccess; NCCL_DEBUG=WARN in the environment makes NCCL tell more";

void check(const Nccl& nccl, ncclResult_t result, const char* call) {
  if (result == kNcclSuccess) return;
  refuse(call, error_text(nccl, result, nullptr), kMore, ErrorCode::unavailable);
}

struct Place {
  int rank = 0;
  int num_ranks = 0;
  int device_index = 0;
};

Place place_of(const Nccl& nccl, ncclComm_t communicator) {
  Place place;
  check(nccl, nccl.comm_user_rank(communicator, &place.rank), "ncclCommUserRank");
  check(nccl, nccl.comm_count(communicator, &place.num_ranks), "ncclCommCount");
  check(nccl, nccl.comm_cu_device(communicator, &place.device_index), "ncclCommCuDevice");
  return place;
}

class NcclRank : public Collectives {
 public:
  NcclRank(const Nccl& nccl, ncclComm_t communicator, const Place& place, bool is_owned)
      : Collectives(place.rank, place.num_ranks, {DeviceKind::cuda, place.device_index}),
        nccl_(nccl),
        communicator_(communicator),
        is_owned_(is_owned) {}

  ~NcclRank() override {
    if (!is_owned_) return;
    if (failure_.empty()) {
      nccl_.comm_destroy(communicator_);
    } else {
      nccl_.comm_abort(communicator_);  // to destroy would wait for work that does not end
    }
  }

  void check() override {
    check_so_far("check");
    ncclResult_t state = kNcclSuccess;
    settle("ncclCommGetAsyncError", nccl_.comm_get_async_error(communicator_, &state));
    settle("check", state);
  }

 protected:
  void all_gather_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    check_so_far("all_gather");
    settle("ncclAllGather", nccl_.all_gather(send, receive, static_cast<size_t>(row_bytes), ncclDataType_t::uint8,
                                             communicator_, handle_of(stream)));
  }

  void reduce_scatter_rows(const float* send, float* receive, int64_t row_elements, Stream stream) override {
    check_so_far("reduce_scatter");
    settle("ncclReduceScatter",
           nccl_.reduce_scatter(send, receive, static_cast<size_t>(row_elements), ncclDataType_t::float32,
                                ncclRedOp_t::sum, communicator_, handle_of(stream)));
  }

  // In one group, so that NCCL runs all at once: one after another they would wait for each other.
  void all_to_all_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    check_so_far("all_to_all");
    const auto bytes = static_cast<size_t>(row_bytes);
    const auto* to = static_cast<const std::byte*>(send);
    auto* from = static_cast<std::byte*>(receive);
    settle("ncclGroupStart", nccl_.group_start());
    ncclResult_t result = kNcclSuccess;
    const auto is_accepted = [&] { return result == kNcclSuccess || result == kNcclInProgress; };
    for (int32_t other = 0; other < num_ranks() && is_accepted(); ++other) {
      const size_t offset = static_cast<size_t>(other) * bytes;
      result = nccl_.send(to + offset, bytes, ncclDataType_t::uint8, other, communicator_, handle_of(stream));
      if (!is_accepted()) break;
      result = nccl_.receive(from + offset, bytes, ncclDataType_t::uint8, other, communicator_, handle_of(stream));
    }
    const ncclResult_t end = nccl_.group_end();  // in any case: a group that is open would swallow the caller's calls
    if (!is_accepted()) settle("ncclSend and ncclRecv", result);
    settle("ncclGroupEnd", end);
  }

 private:
  static jit::CUstream handle_of(Stream stream) { return static_cast<jit::CUstream>(stream.handle); }

  void check_so_far(const char* operation) const {
    if (!failure_.empty()) throw_collective(operation, ErrorCode::unavailable, failure_);
  }

  // A communicator of the caller's may be one whose calls do not block: then the outcome is asked for.
  void settle(const char* call, ncclResult_t result) {
    while (result == kNcclInProgress) {
      std::this_thread::yield();
      const ncclResult_t asked = nccl_.comm_get_async_error(communicator_, &result);
      if (asked != kNcclSuccess) result = asked;
    }
    if (result == kNcclSuccess) return;
    failure_ = error_text(nccl_, result, communicator_);
    refuse(call, failure_, kMore, ErrorCode::unavailable);
  }

  const Nccl& nccl_;
  ncclComm_t communicator_;
  bool is_owned_;
  std::string failure_;  // empty: none
};

}  // namespace

std::shared_ptr<Collectives> nccl_rank(const Nccl& nccl, ncclComm_t communicator, int32_t device_index, bool is_owned) {
  if (communicator == nullptr) refuse("communicator", "a null pointer", "an ncclComm_t");
  const Place place = place_of(nccl, communicator);
  if (place.device_index != device_index) {
    refuse("device_index", device_index, fmt::format("{}, the communicator's", place.device_index),
           ErrorCode::mismatch);
  }
  return std::make_shared<NcclRank>(nccl, communicator, place, is_owned);
}

}  // namespace parallel

NcclUniqueId nccl_unique_id() {
  const parallel::Nccl& nccl = parallel::nccl();
  parallel::ncclUniqueId id;
  parallel::check(nccl, nccl.get_unique_id(&id), "ncclGetUniqueId");
  NcclUniqueId bytes;
  static_assert(sizeof bytes == sizeof id);
  std::memcpy(bytes.data(), &id, sizeof id);
  return bytes;
}

std::shared_ptr<Collectives> nccl_ranks(const NcclUniqueId& id, int32_t num_ranks, int32_t rank, int32_t device_index) {
  if (num_ranks < 1) refuse("num_ranks", num_ranks, "1 or more");
  if (rank < 0 || rank >= num_ranks) refuse("rank", rank, fmt::format("0 … {}", num_ranks - 1));
  const parallel::Nccl& nccl = parallel::nccl();
  parallel::ncclUniqueId own_id;
  std::memcpy(&own_id, id.data(), sizeof own_id);
  const cuda::CurrentDevice current(device_index);  // NCCL takes the thread's
  parallel::ncclComm_t communicator = nullptr;
  parallel::check(nccl, nccl.comm_init_rank(&communicator, num_ranks, own_id, rank), "ncclCommInitRank");
  return parallel::nccl_rank(nccl, communicator, device_index, true);
}

std::shared_ptr<Collectives> nccl_ranks(void* communicator, int32_t device_index) {
  return parallel::nccl_rank(parallel::nccl(), static_cast<parallel::ncclComm_t>(communicator), device_index, false);
}

}  // namespace qkv
