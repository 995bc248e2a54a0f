// What the kernel that rounds rows to 8-bit floats is given. Compiled by the host compiler and by NVRTC.
#pragma once

namespace qkv::cuda {

constexpr int kClearScales = 0;
constexpr int kRaiseScales = 1;
constexpr int kRoundRows = 2;

struct QuantiseParams {
  int step;           // of the three above
  int writes_scales;  // scales were chosen: one that is still 0, of zeros or of nothing, becomes 1

  const void* rows;  // [num_tokens, num_heads, head_dim]
  long long row_token_stride, row_head_stride;
  void* out;  // likewise
  long long out_token_stride, out_head_stride;
  int rows_dtype, out_dtype;  // 0 f32, 1 f16 or 2 bf16; 3 f8e4m3 or 4 f8e5m2
  int head_dim;
  long long num_tokens;

  float* scale;  // [num_requests, num_scales]; where they are not told apart, strides are 0
  long long scale_request_stride, scale_head_stride;
  int num_requests;            // 1 where scales are not of requests
  int num_scales;              // of a request
  int heads_of_scale;          // neighbouring heads that share one
  const int* query_start_loc;  // [num_requests + 1], nullptr where scales are not of requests
};

}  // namespace qkv::cuda
