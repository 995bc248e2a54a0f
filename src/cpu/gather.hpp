#pragma once

#include "plan/gather.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cpu {

// pages [num_pages, page_size, num_heads, head_dim] to rows [plan's rows, num_heads, head_dim], bits kept. A head
// stride of 0 in the pages spreads one row over all heads.
void gather(const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows);

}  // namespace qkv::cpu
