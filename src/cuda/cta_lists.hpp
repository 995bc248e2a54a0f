// Which CTA of a persistent grid runs which items: a pure function, made on the host.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "plan/plan_data.hpp"

namespace qkv::cuda {

struct CtaLists {
  std::vector<plan::WorkItem> items;  // list by list
  std::vector<int32_t> begin;         // [num_ctas + 1]: CTA c runs items[begin[c] … begin[c + 1])
};

// Sections of KV heads, whose keys and values stay in L2 while all query tiles pass over them, one after another;
// inside a section the longest items first, each to the CTA that has least to do. The last sections are joined, so that
// the lists end alike. `heads_per_section(request)`.
CtaLists make_cta_lists(const std::vector<plan::WorkItem>& items, int32_t group_size, int32_t max_ctas,
                        const std::function<int32_t(int32_t)>& heads_per_section);

}  // namespace qkv::cuda
