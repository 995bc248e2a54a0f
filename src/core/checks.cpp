#include "core/checks.hpp"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace qkv {

void check_given(const Tensor& tensor, const char* name, const char* what_for) {
  if (!tensor.is_given()) refuse(name, "nothing", fmt::format("a tensor: {}", what_for));
}

void check_rank(const Tensor& tensor, const char* name, int32_t rank, const char* axes) {
  check_given(tensor, name, axes);
  if (tensor.rank != rank) refuse(name, tensor.describe(), fmt::format("rank {}: {}", rank, axes));
  for (int32_t axis = 0; axis < rank; ++axis) {
    if (tensor.shape[axis] < 0) refuse(name, tensor.describe(), "extents >= 0");
  }
  if (tensor.data == nullptr && tensor.num_elements() != 0) refuse(name, "a null pointer", "the address of the data");
}

void check_extent(const Tensor& tensor, const char* name, int32_t axis, int64_t extent, const char* meaning) {
  if (tensor.shape[axis] != extent) {
    refuse(name, tensor.describe(), fmt::format("{} ({}) on axis {}", extent, meaning, axis), ErrorCode::mismatch);
  }
}

void check_extent_at_least(const Tensor& tensor, const char* name, int32_t axis, int64_t extent, const char* meaning) {
  if (tensor.shape[axis] < extent) {
    refuse(name, tensor.describe(), fmt::format("at least {} ({}) on axis {}", extent, meaning, axis),
           ErrorCode::mismatch);
  }
}

void check_dtype(const Tensor& tensor, const char* name, DType dtype) {
  if (tensor.dtype != dtype) {
    refuse(name, tensor.describe(), fmt::format("dtype {}", to_string(dtype)), ErrorCode::mismatch);
  }
}

void check_float16_or_32(const Tensor& tensor, const char* name) {
  if (tensor.dtype != DType::f32 && tensor.dtype != DType::f16 && tensor.dtype != DType::bf16) {
    refuse(name, tensor.describe(), "dtype f32, f16 or bf16", ErrorCode::mismatch);
  }
}

// Strides of tensors without elements mean nothing: numpy gives them 0.
void check_contiguous(const Tensor& tensor, const char* name) {
  if (tensor.num_elements() == 0) return;
  int64_t step = 1;
  for (int32_t axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] > 1 && tensor.stride[axis] != step) {
      refuse(name, fmt::format("{} with a stride of {} on axis {}", tensor.describe(), tensor.stride[axis], axis),
             fmt::format("a row-major tensor without gaps: stride {}", step));
    }
    step *= tensor.shape[axis];
  }
}

void check_last_axis_contiguous(const Tensor& tensor, const char* name) {
  if (tensor.num_elements() == 0) return;
  const int32_t last = tensor.rank - 1;
  if (tensor.shape[last] > 1 && tensor.stride[last] != 1) {
    refuse(name, fmt::format("{} with stride {} on the last axis", tensor.describe(), tensor.stride[last]),
           "stride 1 on the last axis; copy the tensor or swap its axes");
  }
}

void check_device(const Tensor& tensor, const char* name, Device device) {
  if (tensor.is_given() && tensor.device != device) {
    refuse(name, fmt::format("{} on {}", tensor.describe(), to_string(tensor.device)),
           fmt::format("memory of {}", to_string(device)), ErrorCode::mismatch);
  }
}

void check_host(const Tensor& tensor, const char* name) {
  if (tensor.is_given() && tensor.device != Device{}) {
    refuse(name, fmt::format("{} on {}", tensor.describe(), to_string(tensor.device)),
           "memory of cpu: the host reads it, whatever the layer runs on; copy it first", ErrorCode::mismatch);
  }
}

void check_aligned(const Tensor& tensor, const char* name, int64_t alignment_bytes) {
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(alignment_bytes) != 0) {
    refuse(name, fmt::format("address {}", tensor.data), fmt::format("an address that {} divides", alignment_bytes));
  }
  for (int32_t axis = 0; axis + 1 < tensor.rank; ++axis) {
    const int64_t bytes = tensor.stride[axis] * size_bytes(tensor.dtype);
    if (tensor.shape[axis] > 1 && bytes % alignment_bytes != 0) {
      refuse(name, fmt::format("{} with a stride of {} bytes on axis {}", tensor.describe(), bytes, axis),
             fmt::format("strides that {} bytes divide", alignment_bytes));
    }
  }
}

void check_writable_layout(const Tensor& tensor, const char* name) {
  // Sorted by stride, each axis must step over all that the finer axes cover. Layouts that interleave axes without
  // overlap exist, but nobody uses them for tensors that are written.
  std::vector<int32_t> axes;
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] == 0) return;
    if (tensor.shape[axis] > 1) axes.push_back(axis);
  }
  std::sort(axes.begin(), axes.end(),
            [&](int32_t a, int32_t b) { return std::abs(tensor.stride[a]) < std::abs(tensor.stride[b]); });
  int64_t covered = 1;
  for (const int32_t axis : axes) {
    const int64_t stride = std::abs(tensor.stride[axis]);
    if (stride < covered) {
      refuse(name, fmt::format("{} with stride {} on axis {}", tensor.describe(), tensor.stride[axis], axis),
             "strides that give every element its own place, for a tensor that is written");
    }
    covered += stride * (tensor.shape[axis] - 1);
  }
}

}  // namespace qkv
