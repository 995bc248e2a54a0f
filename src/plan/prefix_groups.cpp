// Which requests share their first keys: as the caller says, checked, or as equal leading entries of the block table
// say. Groups are nested or apart, and those inside others stand behind them.
#include <algorithm>
#include <numeric>
#include <set>

#include "core/checks.hpp"
#include "core/index/paging.hpp"
#include "core/shown_keys.hpp"
#include "plan/builder.hpp"

namespace qkv {

std::string_view to_string(PrefixSharing sharing) {
  switch (sharing) {
    case PrefixSharing::automatic:
      return "automatic";
    case PrefixSharing::always:
      return "always";
    case PrefixSharing::off:
      return "off";
  }
  return "unknown";
}

namespace plan {
namespace {

// Keys that a request can share: up to its first new token. Cross attention's keys are all another sequence's.
int32_t sharable_tokens(const PlanData& plan, int32_t request) {
  const mask::ProgramInput& input = plan.mask_inputs[request];
  if (plan.layer.type == AttentionType::encoder_decoder) return input.kv_len;
  return std::max(input.kv_len - input.q_len, 0);
}

const int32_t* pages_of(const PlanData& plan, int32_t request) { return plan.pages.data() + plan.page_start[request]; }

void check_group(const PlanData& plan, const PrefixGroup& group, const std::string& name) {
  if (group.requests.empty()) refuse(name + ".requests", "none", "at least one request");
  if (group.num_tokens < 1) refuse(name + ".num_tokens", group.num_tokens, "at least 1");
  const int32_t num_pages = index::num_pages(num_shared_keys(plan.layer, group), plan.layer.cache->page_size);
  std::set<int32_t> seen;
  for (size_t i = 0; i < group.requests.size(); ++i) {
    const int32_t request = group.requests[i];
    const std::string member = fmt::format("{}.requests[{}]", name, i);
    if (request < 0 || request >= plan.num_requests) {
      refuse(member, request,
             fmt::format("0 to {}: the batch has {} requests", plan.num_requests - 1, plan.num_requests));
    }
    if (!seen.insert(request).second) refuse(member, fmt::format("{} twice", request), "each request once");
    const int32_t most = sharable_tokens(plan, request);
    if (group.num_tokens > most) {
      refuse(name + ".num_tokens", group.num_tokens,
             fmt::format("at most {}: request {} has {} new of {} keys, and a prefix ends before the first new one",
                         most, request, plan.mask_inputs[request].q_len, plan.seq_lens[request]));
    }
    const int32_t* first = pages_of(plan, group.requests.front());
    const int32_t* own = pages_of(plan, request);
    const auto differing = std::mismatch(first, first + num_pages, own);
    if (differing.first != first + num_pages) {
      refuse(member, request,
             fmt::format("requests whose first {} tokens lie in the same pages: entry {} of block_table is {} for "
                         "request {} and {} for request {}",
                         group.num_tokens, differing.first - first, *differing.first, group.requests.front(),
                         *differing.second, request));
    }
  }
}

// Larger groups first; two that have a member in common must be nested.
void order_groups(std::vector<PrefixGroup>& groups, int32_t num_requests) {
  std::stable_sort(groups.begin(), groups.end(), [](const PrefixGroup& a, const PrefixGroup& b) {
    return a.requests.size() > b.requests.size() ||
           (a.requests.size() == b.requests.size() && a.num_tokens < b.num_tokens);
  });
  std::vector<int32_t> innermost(num_requests, -1);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const int32_t request : groups[g].requests) {
      const int32_t first = groups[g].requests.front();
      if (innermost[request] != innermost[first]) {
        refuse("prefix_groups",
               fmt::format("requests {} and {} in a group, and one of them in another", first, request),
               "groups that are nested or have no request in common: give the larger group that holds both");
      }
    }
    for (const int32_t request : groups[g].requests) innermost[request] = static_cast<int32_t>(g);
  }
}

// Neighbours in the order of their pages share the longest prefixes, so a group is a run of that order.
class GroupFinder {
 public:
  explicit GroupFinder(const PlanData& plan) : plan_(plan), keys_(shown_keys(plan.layer)) {
    for (int32_t request = 0; request < plan.num_requests; ++request) {
      const int32_t keys = keys_.count(0, sharable_tokens(plan, request));
      num_pages_.push_back(keys / plan.layer.cache->page_size);
    }
    order_.resize(plan.num_requests);
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      const int32_t* pages_a = pages_of(plan, a);
      const int32_t* pages_b = pages_of(plan, b);
      return std::lexicographical_compare(pages_a, pages_a + num_pages_[a], pages_b, pages_b + num_pages_[b]);
    });
  }

  std::vector<PrefixGroup> run() {
    for (size_t i = 1; i <= order_.size(); ++i) {
      const int32_t common = i < order_.size() ? common_pages(order_[i - 1], order_[i]) : 0;
      size_t begin = i - 1;
      while (!open_.empty() && open_.back().num_pages > common) {
        begin = open_.back().begin;
        add_group(begin, i, open_.back().num_pages);
        open_.pop_back();
      }
      const bool is_open = !open_.empty() && open_.back().num_pages == common;
      if (common > 0 && !is_open) open_.push_back({begin, common});
    }
    return std::move(groups_);
  }

 private:
  struct Open {
    size_t begin;  // in order_
    int32_t num_pages;
  };

  int32_t common_pages(int32_t a, int32_t b) const {
    const int32_t* first = pages_of(plan_, a);
    const int32_t most = std::min(num_pages_[a], num_pages_[b]);
    return static_cast<int32_t>(std::mismatch(first, first + most, pages_of(plan_, b)).first - first);
  }

  void add_group(size_t begin, size_t end, int32_t num_pages) {
    PrefixGroup& group = groups_.emplace_back();
    group.requests.assign(order_.begin() + static_cast<std::ptrdiff_t>(begin),
                          order_.begin() + static_cast<std::ptrdiff_t>(end));
    std::sort(group.requests.begin(), group.requests.end());
    // Up to the last shown key of these pages.
    group.num_tokens = keys_.position(num_pages * plan_.layer.cache->page_size - 1, 0, 0) + 1;
  }

  const PlanData& plan_;
  const index::ShownKeys keys_;
  std::vector<int32_t> num_pages_;  // that each request can share
  std::vector<int32_t> order_;
  std::vector<Open> open_;  // groups that the next request may belong to, inner ones behind
  std::vector<PrefixGroup> groups_;
};

}  // namespace

void read_prefix_groups(const Batch& batch, PlanData& plan) {
  plan.prefix_sharing = batch.prefix_sharing;
  plan.prefix_sharing_keeps_bits = batch.prefix_sharing_keeps_bits;
  if (!plan.layer.cache) {
    if (batch.prefix_groups.empty()) return;
    refuse("prefix_groups", fmt::format("{} groups", batch.prefix_groups.size()),
           "none: the layer has no cache, so that each request has keys of its own", ErrorCode::mismatch);
  }
  for (size_t g = 0; g < batch.prefix_groups.size(); ++g) {
    check_group(plan, batch.prefix_groups[g], fmt::format("prefix_groups[{}]", g));
  }
  plan.prefix_groups = batch.prefix_groups;
  order_groups(plan.prefix_groups, plan.num_requests);
}

int32_t num_shared_keys(const LayerSpec& layer, const PrefixGroup& group) {
  return shown_keys(layer).count(0, group.num_tokens);
}

void find_prefix_groups(PlanData& plan) {
  if (!plan.layer.cache) return;
  plan.prefix_groups = GroupFinder(plan).run();
  order_groups(plan.prefix_groups, plan.num_requests);
}

}  // namespace plan
}  // namespace qkv
