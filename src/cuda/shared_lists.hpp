// Items whose keys several requests share, as the kernels read them: rows by a table of tokens. Pure, made on the host.
#pragma once

#include <array>
#include <vector>

#include "cuda/device/few_rows_params.hpp"
#include "plan/plan_data.hpp"

namespace qkv::cuda {

// Of one or the other kernel of few rows: a plan's items run by one of them.
struct SharedLists {
  std::vector<SharedToken> tokens;                             // of all items
  std::vector<WorkItem> sm80;                                  // forward_sm80
  std::array<std::vector<FewRowsItem>, kFewRowsTiles> sm90{};  // forward_sm90_few_rows, by the tile of a request's rows
};

SharedLists make_shared_lists(const plan::PlanData& plan, bool few_rows_sm90);

}  // namespace qkv::cuda
