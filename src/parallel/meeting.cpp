#include "parallel/meeting.hpp"

#include <fmt/format.h>

#include <string_view>

#include "parallel/failures.hpp"

namespace qkv::parallel {

Meeting::Meeting(int32_t num_ranks, std::chrono::milliseconds timeout)
    : timeout_(timeout), offers_(static_cast<size_t>(num_ranks)), has_come_(static_cast<size_t>(num_ranks)) {}

const std::vector<Offer>& Meeting::exchange(int32_t rank, const Offer& offer) {
  Lock lock(mutex_);
  offers_[static_cast<size_t>(rank)] = offer;
  come(rank, lock);
  return offers_;  // nobody writes there before all have finished
}

void Meeting::finish(int32_t rank) {
  Lock lock(mutex_);
  come(rank, lock);
}

void Meeting::leave(int32_t rank) {
  const Lock lock(mutex_);
  fail(ErrorCode::unavailable, has_left(rank));
}

void Meeting::check(const char* operation) {
  const Lock lock(mutex_);
  if (failure_) throw_failure(operation);
}

void Meeting::come(int32_t rank, Lock& lock) {
  const char* operation = offers_[static_cast<size_t>(rank)].operation;
  if (failure_) throw_failure(operation);
  has_come_[static_cast<size_t>(rank)] = true;
  if (++num_come_ == offers_.size()) {
    compare_offers();
    if (failure_) throw_failure(operation);
    has_come_.assign(offers_.size(), false);
    num_come_ = 0;
    ++round_;
    changed_.notify_all();
    return;
  }
  const uint64_t round = round_;
  const bool woken = changed_.wait_for(lock, timeout_, [&] { return round_ != round || failure_; });
  if (round_ != round) return;  // a rank may have left since, but not before it finished here
  if (!woken) fail(ErrorCode::unavailable, is_missing(absent_ranks(), timeout_));
  throw_failure(operation);
}

void Meeting::compare_offers() {
  const Offer& first = offers_[0];
  for (size_t rank = 1; rank < offers_.size(); ++rank) {
    const Offer& offer = offers_[rank];
    if (std::string_view(offer.operation) == first.operation && offer.row_bytes == first.row_bytes) continue;
    fail(ErrorCode::mismatch,
         differs(static_cast<int32_t>(rank), offer.operation, offer.row_bytes, 0, first.operation, first.row_bytes));
  }
}

// The first reason stays.
void Meeting::fail(ErrorCode code, std::string value) {
  if (!failure_) failure_ = Failure{code, std::move(value)};
  changed_.notify_all();
}

void Meeting::throw_failure(const char* operation) const {
  throw_collective(operation, failure_->code, failure_->value);
}

std::string Meeting::absent_ranks() const {
  std::vector<int32_t> absent;
  for (size_t rank = 0; rank < has_come_.size(); ++rank) {
    if (!has_come_[rank]) absent.push_back(static_cast<int32_t>(rank));
  }
  return name_ranks(absent);
}

}  // namespace qkv::parallel
