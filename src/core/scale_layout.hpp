// Scales of keys and values or of queries, of any granularity, as one address: what an axis does not tell apart has
// stride 0.
#pragma once

#include <cstdint>

#include "qkv/layer.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

struct ScaleLayout {
  float* data = nullptr;
  int64_t request_stride = 0;  // strides in elements
  int64_t page_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;

  float* at(int64_t request, int64_t page, int64_t token, int64_t head) const {
    return data + request * request_stride + page * page_stride + token * token_stride + head * head_stride;
  }
};

// Of a cache or of queries, by a tensor of the shape that the granularity asks for.
inline ScaleLayout scale_layout(KvScales granularity, const Tensor& scale) {
  ScaleLayout layout;
  layout.data = static_cast<float*>(scale.data);
  switch (granularity) {
    case KvScales::none:
    case KvScales::per_tensor:
      break;
    case KvScales::per_head:
      layout.head_stride = scale.stride[0];
      break;
    case KvScales::per_request_head:
      layout.request_stride = scale.stride[0];
      layout.head_stride = scale.stride[1];
      break;
    case KvScales::per_token_head:
      layout.page_stride = scale.stride[0];
      layout.token_stride = scale.stride[1];
      layout.head_stride = scale.stride[2];
      break;
  }
  return layout;
}

// Of a layer's keys or values. Dense ones are one page, which holds those of all requests.
inline ScaleLayout scale_layout(const LayerSpec& layer, const Tensor& scale) {
  ScaleLayout layout = scale_layout(layer.kv_scales, scale);
  if (!layer.cache && layer.kv_scales == KvScales::per_token_head) {
    layout.page_stride = 0;
    layout.token_stride = scale.stride[0];
    layout.head_stride = scale.stride[1];
  }
  return layout;
}

// What the scales of a query belong to, by their shape: [1], [num_kv_heads] or [num_requests, num_kv_heads]. One for
// all, or one of one head, is the same.
inline KvScales query_scales(const Tensor& scale) {
  if (scale.rank == 2) return KvScales::per_request_head;
  return scale.shape[0] == 1 ? KvScales::per_tensor : KvScales::per_head;
}

}  // namespace qkv
