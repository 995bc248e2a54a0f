#include "cuda/cta_lists.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

namespace qkv::cuda {
namespace {

// Tiles of rows cost alike however many of their rows are used: items are weighed by keys. An item's start and end cost
// about as much as so many keys.
constexpr int64_t kItemOverheadKeys = 160;

// Items a CTA whose sections are joined at the end of the lists, so that the last ones to be dealt out are short.
constexpr size_t kJoinedItemsPerCta = 2;

struct WeighedItem {
  const plan::WorkItem* item;
  int32_t section;  // of the item's request
  int64_t keys;
};

using Section = std::vector<WeighedItem>;

// In the order of requests and KV heads, but for the last ones, which become one.
std::vector<Section> sections_of(const std::vector<plan::WorkItem>& items, int32_t group_size, size_t num_joined,
                                 const std::function<int32_t(int32_t)>& heads_per_section) {
  Section order;
  for (const plan::WorkItem& item : items) {
    const int64_t rows = int64_t{item.query_end - item.query_begin} * group_size;
    order.push_back({&item, item.kv_head / heads_per_section(item.request), item.cost / rows});
  }
  const auto place = [](const WeighedItem& a) { return std::tuple(a.item->request, a.section); };
  std::stable_sort(order.begin(), order.end(),
                   [&](const WeighedItem& a, const WeighedItem& b) { return place(a) < place(b); });
  std::vector<Section> sections;
  for (size_t i = 0; i < order.size(); ++i) {
    const bool is_joined = order.size() - i < num_joined;
    if (i == 0 || (place(order[i]) != place(order[i - 1]) && !is_joined)) sections.emplace_back();
    sections.back().push_back(order[i]);
  }
  for (Section& section : sections) {
    std::stable_sort(section.begin(), section.end(), [](const WeighedItem& a, const WeighedItem& b) {
      return std::tuple(-a.keys, a.item->request, a.item->kv_head) <
             std::tuple(-b.keys, b.item->request, b.item->kv_head);
    });
  }
  return sections;
}

}  // namespace

CtaLists make_cta_lists(const std::vector<plan::WorkItem>& items, int32_t group_size, int32_t max_ctas,
                        const std::function<int32_t(int32_t)>& heads_per_section) {
  using Load = std::pair<int64_t, int32_t>;  // keys so far, CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<>> idlest;
  const int32_t num_ctas = std::min<int32_t>(max_ctas, static_cast<int32_t>(items.size()));
  for (int32_t cta = 0; cta < num_ctas; ++cta) idlest.emplace(0, cta);
  std::vector<std::vector<plan::WorkItem>> lists(num_ctas);
  for (const Section& section : sections_of(items, group_size, num_ctas * kJoinedItemsPerCta, heads_per_section)) {
    for (const WeighedItem& next : section) {
      const auto [load, cta] = idlest.top();
      idlest.pop();
      lists[cta].push_back(*next.item);
      idlest.emplace(load + next.keys + kItemOverheadKeys, cta);
    }
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
