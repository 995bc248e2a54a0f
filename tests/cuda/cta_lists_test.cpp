// Every item lies in one list, sections do not mix, and no list is much longer than another.
#include "cuda/cta_lists.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

namespace qkv::cuda {
namespace {

std::vector<plan::WorkItem> causal_items(int32_t requests, int32_t heads, int32_t blocks) {
  std::vector<plan::WorkItem> items;
  for (int32_t request = 0; request < requests; ++request) {
    for (int32_t head = 0; head < heads; ++head) {
      for (int32_t block = 0; block < blocks; ++block) {
        plan::WorkItem item{};
        item.request = request;
        item.kv_head = head;
        item.query_begin = block * 128;
        item.query_end = item.query_begin + 128;
        item.cost = int64_t{128} * 128 * (block + 1);
        items.push_back(item);
      }
    }
  }
  return items;
}

TEST(cta_lists, every_item_lies_in_one_list) {
  const auto items = causal_items(3, 4, 7);
  const CtaLists lists = make_cta_lists(items, 1, 10, [](int32_t) { return 2; });
  ASSERT_EQ(lists.begin.size(), 11U);
  EXPECT_EQ(lists.begin.front(), 0);
  EXPECT_EQ(lists.begin.back(), static_cast<int32_t>(items.size()));
  EXPECT_TRUE(std::is_sorted(lists.begin.begin(), lists.begin.end()));
  std::set<std::tuple<int32_t, int32_t, int32_t>> seen;
  for (const auto& item : lists.items) seen.insert({item.request, item.kv_head, item.query_begin});
  EXPECT_EQ(seen.size(), items.size());
}

// Keys of each list, with what the start and end of an item cost.
std::vector<int64_t> loads_of(const CtaLists& lists) {
  std::vector<int64_t> loads;
  for (size_t cta = 0; cta + 1 < lists.begin.size(); ++cta) {
    int64_t load = 0;
    for (int32_t i = lists.begin[cta]; i < lists.begin[cta + 1]; ++i) {
      const plan::WorkItem& item = lists.items[i];
      load += item.cost / (item.query_end - item.query_begin) + 160;
    }
    loads.push_back(load);
  }
  return loads;
}

// A few items a CTA, from sections of fewer items than CTAs: dealt out one by one, these ended up to 10 % apart.
TEST(cta_lists, lists_are_even) {
  for (const int32_t blocks : {4, 8, 16, 32, 128}) {
    const CtaLists lists =
        make_cta_lists(causal_items(1024 / 8 / blocks, 8, blocks), 1, 132, [](int32_t) { return 2; });
    const std::vector<int64_t> loads = loads_of(lists);
    const int64_t total = std::accumulate(loads.begin(), loads.end(), int64_t{0});
    EXPECT_LE(static_cast<double>(*std::max_element(loads.begin(), loads.end())) * 132, 1.05 * total) << blocks;
  }
}

TEST(cta_lists, items_of_few_rows_weigh_as_much_as_whole_tiles) {
  std::vector<plan::WorkItem> items = causal_items(1, 2, 2);
  for (plan::WorkItem& item : items) {
    if (item.kv_head == 0) {
      item.query_end = item.query_begin + 2;
      item.cost /= 64;
    }
  }
  EXPECT_EQ(loads_of(make_cta_lists(items, 1, 2, [](int32_t) { return 2; })), (std::vector<int64_t>{704, 704}));
}

TEST(cta_lists, a_list_takes_sections_one_after_another) {
  const CtaLists lists = make_cta_lists(causal_items(1, 8, 16), 1, 4, [](int32_t) { return 2; });
  for (size_t cta = 0; cta + 1 < lists.begin.size(); ++cta) {
    for (int32_t i = lists.begin[cta] + 1; i < lists.begin[cta + 1]; ++i) {
      EXPECT_LE(lists.items[i - 1].kv_head / 2, lists.items[i].kv_head / 2);
    }
  }
}

TEST(cta_lists, fewer_items_than_ctas_and_none) {
  const auto one = [](int32_t) { return 1; };
  EXPECT_EQ(make_cta_lists(causal_items(1, 1, 3), 1, 132, one).begin.size(), 4U);
  EXPECT_EQ(make_cta_lists({}, 1, 132, one).begin, (std::vector<int32_t>{0}));
}

}  // namespace
}  // namespace qkv::cuda
