// Random cases of context parallelism for `qkv check --ranks`, `--mpi` and `--nccl`: a case of plain attention whose
// cache several ranks share.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cases.hpp"
#include "qkv/collectives.hpp"
#include "qkv/context_parallel.hpp"
#include "qkv/reference.hpp"

namespace qkv::tools {

struct ParallelCase {
  Case attention;  // a decoder layer with a cache: what all ranks together must equal
  int32_t num_ranks = 1;
  int32_t interleave_size = 1;
  StateExchange exchange = StateExchange::all_to_all;
  bool with_planner = false;  // plans of a ContextParallelPlanner, whose buffers are larger than the batch

  ContextParallelSpec spec() const { return {attention.layer, interleave_size, exchange}; }
};

ParallelCase draw_parallel_case(uint64_t seed, int64_t index, int32_t num_ranks, DeviceKind device = DeviceKind::cpu);
std::string describe(const ParallelCase& c);

// What the ranks of a case must equal: slow to compute, and the same for all. The first rank of a process that asks
// computes it, and the others wait.
class SharedResult {
 public:
  const reference::Result& get(const std::function<reference::Result()>& compute) {
    std::call_once(computed_, [&] { result_ = compute(); });
    return result_;
  }

 private:
  std::once_flag computed_;
  reference::Result result_;
};

// The part of one rank, on the device of its collectives: the other ranks call it with the same case. Its heads agree
// with the float64 oracle, and its cache is written where it should be. What is wrong, in one line, or nothing.
std::string failure_of_rank(const ParallelCase& c, const std::shared_ptr<Collectives>& collectives);

// All ranks as threads, on one device.
std::string failure_of(const ParallelCase& c, Device device = {});
// The same with ranks that the caller keeps.
std::string failure_of(const ParallelCase& c, const std::vector<std::shared_ptr<Collectives>>& ranks);

// What `run` says of the ranks, as threads on one device: of the first that says anything.
std::string first_failure(int32_t num_ranks, Device device,
                          const std::function<std::string(const std::shared_ptr<Collectives>&)>& run);

// One rank on each GPU that there is, as threads of this process.
std::vector<std::shared_ptr<Collectives>> nccl_ranks_of_all_devices();

}  // namespace qkv::tools
