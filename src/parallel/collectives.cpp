// What every engine's calls have in common: the checks.
#include "qkv/collectives.hpp"

#include <fmt/format.h>

#include <functional>

#include "core/checks.hpp"

namespace qkv {
namespace {

// A tensor of any rank that can be moved as it lies in memory.
void check_movable(const Tensor& tensor, const char* name, Device device) {
  check_given(tensor, name, "what the ranks exchange");
  if (tensor.rank < 0 || tensor.rank > Tensor::kMaxRank) {
    refuse(name, fmt::format("rank {}", tensor.rank), fmt::format("rank 1 … {}", Tensor::kMaxRank));
  }
  check_rank(tensor, name, tensor.rank, "any shape");
  check_contiguous(tensor, name);
  check_device(tensor, name, device);
}

// `stacked` is one of `single` a rank.
void check_stacked(const Tensor& stacked, const char* name, const Tensor& single, const char* single_name,
                   int32_t num_ranks) {
  if (single.rank == Tensor::kMaxRank) {
    refuse(single_name, single.describe(), fmt::format("rank 1 … {}, to leave an axis for ranks", single.rank - 1));
  }
  const std::string axes = fmt::format("[num_ranks, shape of {}]", single_name);
  check_dtype(stacked, name, single.dtype);
  check_rank(stacked, name, single.rank + 1, axes.c_str());
  check_extent(stacked, name, 0, num_ranks, "num_ranks");
  for (int32_t axis = 0; axis < single.rank; ++axis) {
    check_extent(stacked, name, axis + 1, single.shape[axis], fmt::format("as {} has", single_name).c_str());
  }
}

int64_t num_bytes(const Tensor& tensor) { return tensor.num_elements() * size_bytes(tensor.dtype); }

// Engines copy rows from send to receive in any order.
void check_apart(const Tensor& send, const Tensor& receive) {
  const auto* send_begin = static_cast<const std::byte*>(send.data);
  const auto* receive_begin = static_cast<const std::byte*>(receive.data);
  if (std::less_equal<>()(send_begin + num_bytes(send), receive_begin)) return;
  if (std::less_equal<>()(receive_begin + num_bytes(receive), send_begin)) return;
  refuse("receive", fmt::format("{} that overlaps send", receive.describe()), "memory apart from send");
}

}  // namespace

Collectives::Collectives(int32_t rank, int32_t num_ranks, Device device)
    : rank_(rank), num_ranks_(num_ranks), device_(device) {
  if (num_ranks < 1) refuse("num_ranks", num_ranks, "1 or more");
  if (rank < 0 || rank >= num_ranks) refuse("rank", rank, fmt::format("0 … {}", num_ranks - 1));
}

void Collectives::all_gather(const Tensor& send, const Tensor& receive, Stream stream) {
  check_movable(send, "send", device_);
  check_movable(receive, "receive", device_);
  check_stacked(receive, "receive", send, "send", num_ranks_);
  if (num_bytes(send) == 0) return;
  check_apart(send, receive);
  all_gather_rows(send.data, receive.data, num_bytes(send), stream);
}

void Collectives::reduce_scatter(const Tensor& send, const Tensor& receive, Stream stream) {
  check_movable(send, "send", device_);
  check_movable(receive, "receive", device_);
  check_dtype(receive, "receive", DType::f32);
  check_stacked(send, "send", receive, "receive", num_ranks_);
  if (receive.num_elements() == 0) return;
  check_aligned(send, "send", sizeof(float));
  check_aligned(receive, "receive", sizeof(float));
  check_apart(send, receive);
  reduce_scatter_rows(static_cast<const float*>(send.data), static_cast<float*>(receive.data), receive.num_elements(),
                      stream);
}

void Collectives::all_to_all(const Tensor& send, const Tensor& receive, Stream stream) {
  check_movable(send, "send", device_);
  check_movable(receive, "receive", device_);
  check_dtype(receive, "receive", send.dtype);
  check_extent(send, "send", 0, num_ranks_, "num_ranks");
  check_rank(receive, "receive", send.rank, "as send has");
  for (int32_t axis = 0; axis < send.rank; ++axis) {
    check_extent(receive, "receive", axis, send.shape[axis], "as send has");
  }
  if (num_bytes(send) == 0) return;
  check_apart(send, receive);
  all_to_all_rows(send.data, receive.data, num_bytes(send) / num_ranks_, stream);
}

}  // namespace qkv
