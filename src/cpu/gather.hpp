#pragma once

#include "plan/gather.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cpu {

// pages [num_pages, page_size, num_heads, head_dim] to rows [plan's rows, num_heads, head_dim]: of the same dtype, bits
// kept; or 8-bit elements to others, times *scale. A head stride of 0 in the pages spreads one row over all heads.
void gather(const Tensor& pages, const plan::GatherPlan& plan, const Tensor& rows, const Tensor& scale);

}  // namespace qkv::cpu
