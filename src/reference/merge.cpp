// States over disjoint keys, joined: the softmax over the union, in float64.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checks.hpp"
#include "qkv/reference.hpp"

namespace qkv::reference {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

void merge_row(const std::vector<StateValues>& states, int64_t lse_index, int64_t out_index, int64_t dim,
               StateValues& merged) {
  double maximum = kMinusInfinity;
  for (const StateValues& state : states) {
    const double lse = state.lse[lse_index];
    if (std::isnan(lse) || lse == -kMinusInfinity) {
      merged.lse[lse_index] = std::nan("");
      std::fill_n(&merged.out[out_index], dim, std::nan(""));
      return;
    }
    maximum = std::max(maximum, lse);
  }
  if (maximum == kMinusInfinity) return;  // all states are empty
  double denominator = 0;
  for (const StateValues& state : states) denominator += std::exp(state.lse[lse_index] - maximum);
  merged.lse[lse_index] = maximum + std::log(denominator);
  for (const StateValues& state : states) {
    if (state.lse[lse_index] == kMinusInfinity) continue;  // an empty state's values are not read
    const double weight = std::exp(state.lse[lse_index] - maximum) / denominator;
    for (int64_t c = 0; c < dim; ++c) merged.out[out_index + c] += weight * state.out[out_index + c];
  }
}

}  // namespace

StateValues merge(const std::vector<StateValues>& states) {
  if (states.empty()) refuse("states", "none", "at least one state");
  const StateValues& first = states[0];
  const int64_t num_rows = static_cast<int64_t>(first.lse.size());
  if (first.num_heads < 1 || num_rows % first.num_heads != 0) {
    refuse("states[0].num_heads", first.num_heads, "a divisor of the number of LSE values");
  }
  for (const StateValues& state : states) {
    if (state.lse.size() != first.lse.size() || state.out.size() != first.out.size() ||
        state.num_heads != first.num_heads) {
      refuse("states", "different sizes", "states of the same rows", ErrorCode::mismatch);
    }
  }
  StateValues merged{first.num_heads, std::vector<double>(first.out.size(), 0.0),
                     std::vector<double>(first.lse.size(), kMinusInfinity)};
  if (num_rows == 0) return merged;
  const int64_t num_tokens = num_rows / first.num_heads;
  const int64_t dim = static_cast<int64_t>(first.out.size()) / num_rows;
  for (int64_t head = 0; head < first.num_heads; ++head) {
    for (int64_t token = 0; token < num_tokens; ++token) {
      merge_row(states, head * num_tokens + token, (token * first.num_heads + head) * dim, dim, merged);
    }
  }
  return merged;
}

}  // namespace qkv::reference
