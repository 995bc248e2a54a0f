#include "scheduler.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "qkv/status.hpp"

namespace qkv::replay {

void check_fits(const TracedRequest& request, const SchedulerLimits& limits) {
  const int32_t tokens = request.context_tokens + request.generated_tokens;
  const int64_t cache_tokens = int64_t{limits.num_pages} * limits.page_size;
  if (tokens <= cache_tokens) return;
  throw Error(ErrorCode::invalid_argument, "--cache-tokens", fmt::format("{} in whole pages", cache_tokens),
              fmt::format("at least {}, which one request of the trace needs", tokens));
}

Scheduler::Scheduler(const SchedulerLimits& limits) : limits_(limits), pool_(limits.num_pages) {
  running_.reserve(static_cast<size_t>(limits.max_requests));
  step_.reserve(static_cast<size_t>(limits.max_requests));
}

void Scheduler::arrive(const TracedRequest& request) {
  check_fits(request, limits_);
  waiting_.push_back({request.context_tokens, request.generated_tokens});
}

std::span<const StepRequest> Scheduler::next_step() {
  for (Request& request : running_) request.num_new = 0;
  budget_ = limits_.max_step_tokens;
  const int64_t preemptions_before = counts_.preemptions;
  continue_running();
  // What a preemption freed is for those that run.
  if (counts_.preemptions == preemptions_before) admit_waiting();
  step_.clear();
  for (const Request& request : running_) {
    if (request.num_new > 0) step_.push_back({request.num_new, request.computed + request.num_new, request.pages});
  }
  return step_;
}

void Scheduler::continue_running() {
  for (size_t i = 0; i < running_.size() && budget_ > 0; ++i) {
    const int32_t num_new = std::min(running_[i].known() - running_[i].computed, budget_);
    while (i < running_.size() && !pool_.grow(running_[i].pages, pages_for(running_[i].computed + num_new))) {
      preempt_last();
    }
    if (i < running_.size()) place(running_[i]);
  }
}

void Scheduler::admit_waiting() {
  while (!waiting_.empty() && num_running() < limits_.max_requests && budget_ > 0) {
    Request& next = waiting_.front();
    // Its first chunk alone might fit, but then it would soon wait for the rest and hold pages meanwhile.
    if (pages_for(next.known()) > pool_.num_free()) return;
    running_.push_back(std::move(next));
    waiting_.pop_front();
    place(running_.back());
  }
}

// The request admitted last gives way; its tokens are computed again later.
void Scheduler::preempt_last() {
  Request request = std::move(running_.back());
  running_.pop_back();
  pool_.give_back(request.pages);
  request.computed_before = std::max(request.computed_before, request.computed);
  request.computed = 0;
  ++counts_.preemptions;
  waiting_.push_front(std::move(request));
}

// Gives the request its tokens of the step. The pool has the pages: the caller has seen to it.
void Scheduler::place(Request& request) {
  request.num_new = std::min(request.known() - request.computed, budget_);
  pool_.grow(request.pages, pages_for(request.computed + request.num_new));
  budget_ -= request.num_new;
}

void Scheduler::complete_step() {
  for (Request& request : running_) {
    if (request.num_new == 0) continue;
    const int32_t again = std::clamp(request.computed_before - request.computed, 0, request.num_new);
    counts_.recomputed_tokens += again;
    counts_.computed_tokens += request.num_new;
    request.computed += request.num_new;
    if (request.computed == request.known() && request.generated < request.to_generate) {
      ++request.generated;
      ++counts_.generated_tokens;
    }
  }
  // The last token is the answer's end: nobody attends to it, so it is never computed.
  const auto is_finished = [](const Request& request) {
    return request.computed >= request.context_tokens && request.generated == request.to_generate;
  };
  for (Request& request : running_) {
    if (!is_finished(request)) continue;
    pool_.give_back(request.pages);
    ++counts_.finished_requests;
  }
  std::erase_if(running_, is_finished);
}

}  // namespace qkv::replay
