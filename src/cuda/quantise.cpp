#include "cuda/quantise.hpp"

#include <algorithm>

#include "core/scale_layout.hpp"
#include "cuda/device/quantise_params.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/launch.hpp"

namespace qkv::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr int64_t kTokensOfCta = 8;
constexpr int64_t kMaxTokenBlocks = 1 << 20;  // CTAs take turns at the tokens beyond

QuantiseParams params_of(const Tensor& rows, const Tensor& out, const Tensor& scale, const Tensor& query_start_loc) {
  QuantiseParams params{};
  params.rows = rows.data;
  params.row_token_stride = rows.stride[0];
  params.row_head_stride = rows.stride[1];
  params.rows_dtype = dtype_code(rows.dtype);
  params.out = out.data;
  params.out_token_stride = out.stride[0];
  params.out_head_stride = out.stride[1];
  params.out_dtype = dtype_code(out.dtype);
  params.num_tokens = rows.shape[0];
  params.head_dim = static_cast<int>(rows.shape[2]);
  const ScaleLayout layout = scale_layout(query_scales(scale), scale);
  params.scale = layout.data;
  params.scale_request_stride = layout.request_stride;
  params.scale_head_stride = layout.head_stride;
  params.num_scales = static_cast<int>(scale.shape[scale.rank - 1]);
  params.heads_of_scale = static_cast<int>(rows.shape[1]) / params.num_scales;
  params.num_requests = query_start_loc.is_given() ? static_cast<int>(scale.shape[0]) : 1;
  params.query_start_loc = static_cast<const int*>(query_start_loc.data);
  return params;
}

}  // namespace

void quantise(const jit::Kernel& kernel, const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
              const Tensor& query_start_loc, jit::CUstream stream) {
  QuantiseParams params = params_of(rows, out, scale, query_start_loc);
  const auto token_blocks = static_cast<uint32_t>(
      std::clamp<int64_t>((params.num_tokens + kTokensOfCta - 1) / kTokensOfCta, 1, kMaxTokenBlocks));
  const LaunchShape of_rows{token_blocks, static_cast<uint32_t>(rows.shape[1]), kThreads, 0};
  if (source == ScaleSource::chosen) {
    const int64_t num_scales = int64_t{params.num_requests} * params.num_scales;
    params.step = kClearScales;
    launch(kernel, {static_cast<uint32_t>((num_scales + kThreads - 1) / kThreads), 1, kThreads, 0}, {&params}, stream);
    params.step = kRaiseScales;
    launch(kernel, of_rows, {&params}, stream);
    params.writes_scales = 1;
  }
  params.step = kRoundRows;
  launch(kernel, of_rows, {&params}, stream);
}

}  // namespace qkv::cuda
