// Ranks that are threads of one process: they meet, read each other's memory, and meet again.
#include <fmt/format.h>

#include "core/checks.hpp"
#include "parallel/meeting.hpp"
#include "parallel/rows.hpp"
#include "qkv/collectives.hpp"

namespace qkv {
namespace {

using parallel::Offer;
using parallel::Rows;

class InProcessRank : public Collectives {
 public:
  InProcessRank(int32_t rank, int32_t num_ranks, Device device, std::shared_ptr<parallel::Meeting> meeting,
                std::unique_ptr<parallel::RowMover> mover)
      : Collectives(rank, num_ranks, device), meeting_(std::move(meeting)), mover_(std::move(mover)) {}
  ~InProcessRank() override { meeting_->leave(rank()); }

  void check() override { meeting_->check("check"); }

 protected:
  void all_gather_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    exchange({"all_gather", static_cast<const std::byte*>(send), row_bytes}, 0, stream,
             [&](const Rows& rows) { mover_->gather(rows, static_cast<std::byte*>(receive), row_bytes, stream); });
  }
  void reduce_scatter_rows(const float* send, float* receive, int64_t row_elements, Stream stream) override {
    const auto row_bytes = static_cast<int64_t>(sizeof(float)) * row_elements;
    exchange({"reduce_scatter", reinterpret_cast<const std::byte*>(send), row_bytes}, rank() * row_bytes, stream,
             [&](const Rows& rows) { mover_->sum(rows, receive, row_elements, stream); });
  }
  void all_to_all_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    exchange({"all_to_all", static_cast<const std::byte*>(send), row_bytes}, rank() * row_bytes, stream,
             [&](const Rows& rows) { mover_->gather(rows, static_cast<std::byte*>(receive), row_bytes, stream); });
  }

 private:
  // read(rows) takes the row at own_offset of what each rank sends.
  template <class Read>
  void exchange(const Offer& offer, int64_t own_offset, Stream stream, const Read& read) {
    meeting_->check(offer.operation);
    mover_->prepare(stream);
    try {
      Rows rows;
      for (const Offer& other : meeting_->exchange(rank(), offer)) rows.push_back(other.send + own_offset);
      read(rows);
      meeting_->finish(rank());
      mover_->release(stream);
    } catch (...) {
      meeting_->leave(rank());  // or the others would wait for it
      throw;
    }
  }

  std::shared_ptr<parallel::Meeting> meeting_;
  std::unique_ptr<parallel::RowMover> mover_;
};

}  // namespace

std::vector<std::shared_ptr<Collectives>> in_process_ranks(int32_t num_ranks, Device device,
                                                           std::chrono::milliseconds timeout) {
  if (num_ranks < 1) refuse("num_ranks", num_ranks, "1 or more");
  if (timeout.count() <= 0) refuse("timeout", fmt::format("{} ms", timeout.count()), "more than 0 ms");
  std::vector<std::unique_ptr<parallel::RowMover>> movers;
  if (device.kind == DeviceKind::cuda) {
    movers = parallel::cuda_row_movers(num_ranks, device.index);
  } else {
    for (int32_t rank = 0; rank < num_ranks; ++rank) movers.push_back(parallel::cpu_row_mover());
  }
  const auto meeting = std::make_shared<parallel::Meeting>(num_ranks, timeout);
  std::vector<std::shared_ptr<Collectives>> ranks;
  ranks.reserve(movers.size());
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    ranks.push_back(std::make_shared<InProcessRank>(rank, num_ranks, device, meeting,
                                                    std::move(movers[static_cast<size_t>(rank)])));
  }
  return ranks;
}

}  // namespace qkv
