#include "cuda/cta_lists.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

namespace qkv::cuda {

CtaLists make_cta_lists(const std::vector<plan::WorkItem>& items, int32_t max_ctas,
                        const std::function<int32_t(int32_t)>& heads_per_section) {
  std::vector<plan::WorkItem> order = items;
  const auto section_of = [&](const plan::WorkItem& item) { return item.kv_head / heads_per_section(item.request); };
  std::stable_sort(order.begin(), order.end(), [&](const plan::WorkItem& a, const plan::WorkItem& b) {
    return std::tuple(a.request, section_of(a), -a.cost, a.kv_head) <
           std::tuple(b.request, section_of(b), -b.cost, b.kv_head);
  });

  using Load = std::pair<int64_t, int32_t>;  // cost so far, CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<>> idlest;
  const int32_t num_ctas = std::min<int32_t>(max_ctas, static_cast<int32_t>(items.size()));
  for (int32_t cta = 0; cta < num_ctas; ++cta) idlest.emplace(0, cta);
  std::vector<std::vector<plan::WorkItem>> lists(num_ctas);
  for (const plan::WorkItem& item : order) {
    const auto [load, cta] = idlest.top();
    idlest.pop();
    lists[cta].push_back(item);
    // An item's start and end cost about as much as a tile of 128 x 128 pairs.
    constexpr int64_t kItemOverhead = 128 * 128;
    idlest.emplace(load + item.cost + kItemOverhead, cta);
  }

  CtaLists result;
  result.begin.push_back(0);
  for (const auto& list : lists) {
    result.items.insert(result.items.end(), list.begin(), list.end());
    result.begin.push_back(static_cast<int32_t>(result.items.size()));
  }
  return result;
}

}  // namespace qkv::cuda
