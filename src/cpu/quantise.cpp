#include "cpu/quantise.hpp"

#include <algorithm>
#include <vector>

#include "core/eight_bit.hpp"
#include "core/index/token_requests.hpp"
#include "core/scale_layout.hpp"
#include "cpu/kernels.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

// Tokens handed to a thread at once: enough to outweigh the hand-over.
constexpr int64_t kTokensPerTask = 64;

// The tensors of one call, and which scale belongs to which row.
class Rows {
 public:
  Rows(const Tensor& rows, const Tensor& out, const Tensor& scale, const Tensor& query_start_loc)
      : rows_(rows),
        out_(out),
        scales_(scale_layout(query_scales(scale), scale)),
        num_scales_(scale.shape[scale.rank - 1]),
        heads_of_scale_(rows.shape[1] / std::max<int64_t>(num_scales_, 1)) {
    if (!query_start_loc.is_given()) return;
    num_requests_ = scale.shape[0];
    for (int64_t r = 0; r <= num_requests_; ++r) {
      starts_.push_back(static_cast<const int32_t*>(query_start_loc.data)[r * query_start_loc.stride[0]]);
    }
  }

  void choose_scales() const {
    // Of each token and scale: which tokens a thread has does not matter then.
    std::vector<float> of_tokens(num_tokens() * num_scales_, 0.0F);
    for_each_token([&](int64_t token) {
      for (int64_t head = 0; head < rows_.shape[1]; ++head) {
        float& largest = of_tokens[token * num_scales_ + head / heads_of_scale_];
        largest = std::max(largest, kernels_.largest_magnitude(rows_.dtype, row(token, head), rows_.shape[2]));
      }
    });
    std::vector<float> largest(num_requests_ * num_scales_, 0.0F);
    for (int64_t token = 0; token < num_tokens(); ++token) {
      for (int64_t s = 0; s < num_scales_; ++s) {
        float& of_request = largest[request_of(token) * num_scales_ + s];
        of_request = std::max(of_request, of_tokens[token * num_scales_ + s]);
      }
    }
    for (int64_t request = 0; request < num_requests_; ++request) {
      for (int64_t s = 0; s < num_scales_; ++s) {
        *scales_.at(request, 0, 0, s) =
            index::row_scale(largest[request * num_scales_ + s], largest_float8(out_.dtype));
      }
    }
  }

  void round() const {
    for_each_token([&](int64_t token) {
      const int64_t request = request_of(token);
      for (int64_t head = 0; head < rows_.shape[1]; ++head) {
        auto* target = static_cast<std::byte*>(out_.data) + token * out_.stride[0] + head * out_.stride[1];
        const float scale = *scales_.at(request, 0, 0, head / heads_of_scale_);
        kernels_.convert({rows_.dtype, out_.dtype, Scaling::divided, scale}, row(token, head), rows_.shape[2], target);
      }
    });
  }

 private:
  int64_t num_tokens() const { return starts_.empty() ? rows_.shape[0] : starts_.back(); }

  int64_t request_of(int64_t token) const {
    return starts_.empty() ? 0 : index::request_of_token(starts_.data(), static_cast<int>(num_requests_), token);
  }

  const std::byte* row(int64_t token, int64_t head) const {
    return static_cast<const std::byte*>(rows_.data) +
           (token * rows_.stride[0] + head * rows_.stride[1]) * size_bytes(rows_.dtype);
  }

  template <class Action>
  void for_each_token(Action action) const {
    const int64_t work = num_tokens() * rows_.shape[1] * rows_.shape[2];
    parallel_for((num_tokens() + kTokensPerTask - 1) / kTokensPerTask, work, [&](int64_t task) {
      const int64_t end = std::min(num_tokens(), (task + 1) * kTokensPerTask);
      for (int64_t token = task * kTokensPerTask; token < end; ++token) action(token);
    });
  }

  const RowKernels& kernels_ = *forward_kernels().rows;
  const Tensor& rows_;
  const Tensor& out_;
  const ScaleLayout scales_;
  const int64_t num_scales_;  // of a request
  const int64_t heads_of_scale_;
  int64_t num_requests_ = 1;
  std::vector<int32_t> starts_;  // [num_requests + 1], where scales are of requests
};

}  // namespace

void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
              const Tensor& query_start_loc) {
  const Rows call(rows, out, scale, query_start_loc);
  if (source == ScaleSource::chosen) call.choose_scales();
  call.round();
}

}  // namespace qkv::cpu
