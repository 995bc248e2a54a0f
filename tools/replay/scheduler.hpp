// Which requests a step holds, as serving engines choose: continuous batching with chunked prefill under a token
// budget, a paged cache, and preemption by recomputation when it is full. A pure state machine: it knows no clock and
// no tensor.
//
//   arrive(request) …  while (has_work()) { use(next_step()); complete_step(); }
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "page_pool.hpp"
#include "trace.hpp"

namespace qkv::replay {

struct SchedulerLimits {
  int32_t max_requests;     // of a step
  int32_t max_step_tokens;  // new tokens of a step: the budget that long prompts are cut by
  int32_t num_pages;
  int32_t page_size;
};

// Refuses a request that the whole cache could not hold.
void check_fits(const TracedRequest& request, const SchedulerLimits& limits);

// A request's part in a step.
struct StepRequest {
  int32_t num_new;   // tokens computed in this step: the last ones of
  int32_t num_keys;  // cached and new
  std::span<const int32_t> pages;
};

struct SchedulerCounts {
  int64_t finished_requests = 0;
  int64_t generated_tokens = 0;
  int64_t computed_tokens = 0;
  int64_t recomputed_tokens = 0;  // of computed_tokens: those that a preemption had thrown away
  int64_t preemptions = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits);

  // See check_fits.
  void arrive(const TracedRequest& request);
  bool has_work() const { return !running_.empty() || !waiting_.empty(); }

  // The next step; valid until complete_step. Requests that run come first, in order of admission, then as many waiting
  // ones as budget and cache allow. Never empty while there is work.
  std::span<const StepRequest> next_step();
  // The step has run: a request whose tokens are all computed gets its next one, or is finished and frees its pages.
  void complete_step();

  int32_t num_running() const { return static_cast<int32_t>(running_.size()); }
  int32_t num_waiting() const { return static_cast<int32_t>(waiting_.size()); }
  const PagePool& pool() const { return pool_; }
  const SchedulerCounts& counts() const { return counts_; }

 private:
  struct Request {
    int32_t context_tokens;
    int32_t to_generate;
    int32_t generated = 0;
    int32_t computed = 0;         // keys in the cache
    int32_t computed_before = 0;  // keys that a preemption threw away
    int32_t num_new = 0;          // of the present step
    std::vector<int32_t> pages = {};

    int32_t known() const { return context_tokens + generated; }
  };

  int32_t pages_for(int32_t tokens) const { return (tokens + limits_.page_size - 1) / limits_.page_size; }
  void continue_running();
  void admit_waiting();
  void preempt_last();
  void place(Request& request);

  SchedulerLimits limits_;
  PagePool pool_;
  std::vector<Request> running_;  // in order of admission
  std::deque<Request> waiting_;
  int32_t budget_ = 0;  // left of the step being made
  std::vector<StepRequest> step_;
  SchedulerCounts counts_;
};

}  // namespace qkv::replay
