// MLA's projection of latents to the keys and values of all heads, by a matrix.
#pragma once

#include "qkv/tensor.hpp"

namespace qkv::plan {

// weights [num_heads·(key_dim + value_dim), depth], the last axis contiguous: a head's key rows, then its value rows.
struct ProjectionMatrix {
  Tensor weights;
  int32_t num_heads = 0;
  int32_t key_dim = 0;
  int32_t value_dim = 0;

  int64_t depth() const { return weights.shape[1]; }
};

// All of the matrix's dtype, last axes contiguous.
struct ProjectionTensors {
  Tensor latents;  // [num_tokens, depth]
  Tensor key;      // [num_tokens, num_heads, key_dim]
  Tensor value;    // [num_tokens, num_heads, value_dim]
};

}  // namespace qkv::plan
