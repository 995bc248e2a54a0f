// Processes that mpirun started. A call sends a row to each rank and receives one from each, without blocking, and asks
// again and again whether all is done: so a rank that is missing is an error and not a hang, and known by its number.
// MPI's own collectives would not say who is missing, and where ranks disagree they end with wrong values.
#include <fmt/format.h>

#include <limits>
#include <thread>

#include "core/checks.hpp"
#include "parallel/failures.hpp"
#include "parallel/mpi_plugin.hpp"
#include "parallel/rows.hpp"
#include "qkv/collectives.hpp"

namespace qkv {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using parallel::MpiGroup;
using parallel::MpiOddRow;
using parallel::MpiRows;
using parallel::MpiTable;

// Names of tags.
enum Operation : int32_t { kOpening = 0, kLeft = parallel::kMpiLeftTag, kAllGather, kReduceScatter, kAllToAll };
constexpr const char* kNames[] = {"mpi_ranks", "leave", "all_gather", "reduce_scatter", "all_to_all"};

constexpr auto kLookAroundAfter = 1ms;
// Asked without a pause first: MPI moves the pieces of a large row while it is asked, and only then. After that, the
// core is left to others.
constexpr auto kPauseAfter = 20ms;
constexpr auto kPause = 50us;

// An open communicator, and the waiting.
class MpiExchange {
 public:
  MpiExchange(const MpiTable& table, const MpiOptions& options) : table_(table), timeout_(options.timeout) {
    const int32_t* communicator = options.fortran_communicator ? &*options.fortran_communicator : nullptr;
    if (const char* text = table_.open(communicator, &group_)) {
      refuse("mpi_ranks", text, "an MPI that starts, and a communicator's handle (MPI_Comm_c2f), if one is given",
             ErrorCode::unavailable);
    }
    try {
      wait([&](bool) {
        bool is_done = false;
        succeed(table_.test_open(group_, &is_done));
        return is_done;
      });
      succeed(table_.size(group_, &rank_, &num_ranks_));
    } catch (...) {
      table_.close(group_, true);
      throw;
    }
  }
  ~MpiExchange() { table_.close(group_, has_failed()); }
  MpiExchange(const MpiExchange&) = delete;
  MpiExchange& operator=(const MpiExchange&) = delete;

  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return num_ranks_; }
  bool has_failed() const { return !failure_.empty(); }

  void check(const char* operation) const {
    if (has_failed()) parallel::throw_collective(operation, code_, failure_);
  }

  // send_stride as in MpiRows.
  void run(Operation operation, const void* send, int64_t send_stride, void* receive, int64_t row_bytes) {
    check(kNames[operation]);
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (row_bytes > kMost) {
      refuse("send", fmt::format("{} bytes a rank", row_bytes),
             fmt::format("at most {} bytes a rank through MPI: cut the tensor", kMost), ErrorCode::unsupported);
    }
    rows_ = {operation, static_cast<int32_t>(row_bytes), send, send_stride, receive};
    succeed(table_.start(group_, rows_));
    wait([&](bool look_around) {
      bool is_done = false;
      MpiOddRow odd;
      succeed(table_.test(group_, look_around, &is_done, &odd));
      if (odd.rank >= 0) fail_by(odd);
      return is_done;
    });
  }

 private:
  template <class IsDone>
  void wait(const IsDone& is_done) {
    const auto start = Clock::now();
    for (;;) {
      const auto waited = Clock::now() - start;
      if (is_done(waited >= kLookAroundAfter)) return;
      if (waited > timeout_) fail(ErrorCode::unavailable, parallel::is_missing(silent_ranks(), timeout_));
      if (waited >= kPauseAfter) {
        std::this_thread::sleep_for(kPause);
      } else {
        std::this_thread::yield();
      }
    }
  }

  std::string silent_ranks() const {
    std::vector<int32_t> silent;
    for (int32_t other = 0; other < num_ranks_; ++other) {
      if (table_.is_silent(group_, other)) silent.push_back(other);
    }
    return silent.empty() ? "answer of some rank" : parallel::name_ranks(silent);
  }

  void succeed(const char* text) {
    if (text != nullptr) fail(ErrorCode::unavailable, text);
  }

  [[noreturn]] void fail_by(const MpiOddRow& odd) {
    if (odd.tag == kLeft) fail(ErrorCode::unavailable, parallel::has_left(odd.rank));
    fail(ErrorCode::mismatch,
         parallel::differs(odd.rank, kNames[odd.tag], odd.row_bytes, rank_, kNames[rows_.tag], rows_.row_bytes));
  }

  [[noreturn]] void fail(ErrorCode code, std::string reason) {
    code_ = code;
    failure_ = std::move(reason);
    parallel::throw_collective(kNames[rows_.tag], code_, failure_);
  }

  const MpiTable& table_;
  const std::chrono::milliseconds timeout_;
  MpiGroup* group_ = nullptr;
  int32_t rank_ = 0;
  int32_t num_ranks_ = 0;
  MpiRows rows_;  // of the present call
  ErrorCode code_ = ErrorCode::unavailable;
  std::string failure_;  // empty: none
};

class MpiRank : public Collectives {
 public:
  explicit MpiRank(std::unique_ptr<MpiExchange> exchange)
      : Collectives(exchange->rank(), exchange->num_ranks(), {}), exchange_(std::move(exchange)) {}

  void check() override { exchange_->check("check"); }

 protected:
  void all_gather_rows(const void* send, void* receive, int64_t row_bytes, Stream) override {
    exchange_->run(kAllGather, send, 0, receive, row_bytes);
  }

  // The rows are exchanged and summed here, in the order of ranks: the bits do not depend on what MPI would choose.
  void reduce_scatter_rows(const float* send, float* receive, int64_t row_elements, Stream) override {
    const auto row_bytes = row_elements * static_cast<int64_t>(sizeof(float));
    received_.resize(static_cast<size_t>(row_elements * num_ranks()));
    exchange_->run(kReduceScatter, send, row_bytes, received_.data(), row_bytes);
    parallel::Rows rows;
    for (int32_t i = 0; i < num_ranks(); ++i) {
      rows.push_back(reinterpret_cast<const std::byte*>(received_.data() + i * row_elements));
    }
    parallel::sum_rows(rows, receive, row_elements);
  }

  void all_to_all_rows(const void* send, void* receive, int64_t row_bytes, Stream) override {
    exchange_->run(kAllToAll, send, row_bytes, receive, row_bytes);
  }

 private:
  std::vector<float> received_;
  std::unique_ptr<MpiExchange> exchange_;  // ends first: it gives up what is still to be received
};

}  // namespace

std::shared_ptr<Collectives> mpi_ranks(const MpiOptions& options) {
  if (options.timeout.count() <= 0) refuse("timeout", fmt::format("{} ms", options.timeout.count()), "more than 0 ms");
  return std::make_shared<MpiRank>(std::make_unique<MpiExchange>(*parallel::mpi_plugin().table, options));
}

}  // namespace qkv
