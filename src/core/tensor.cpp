#include "qkv/tensor.hpp"

#include <fmt/format.h>

#include "core/checks.hpp"

namespace qkv {
namespace {

Tensor view_of(const void* data, size_t count, DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor view = Tensor::contiguous(data, dtype, shape);
  if (view.num_elements() != static_cast<int64_t>(count)) {
    refuse("shape", view.describe(), fmt::format("a shape of {} elements, as many as the vector has", count));
  }
  return view;
}

}  // namespace

int32_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::i8:
      return 1;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::i64:
      return 8;
  }
  return 0;
}

std::string_view to_string(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f8e4m3:
      return "f8e4m3";
    case DType::f8e5m2:
      return "f8e5m2";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::i8:
      return "i8";
  }
  return "unknown";
}

std::string to_string(Device device) {
  return device.kind == DeviceKind::cpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

Tensor Tensor::contiguous(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device) {
  Tensor view = strided(data, dtype, shape, shape, device);
  int64_t step = 1;
  for (int32_t axis = view.rank - 1; axis >= 0; --axis) {
    view.stride[axis] = step;
    step *= view.shape[axis];
  }
  return view;
}

Tensor Tensor::strided(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                       std::initializer_list<int64_t> stride, Device device) {
  if (shape.size() < 1 || shape.size() > kMaxRank) refuse("shape", fmt::format("{} axes", shape.size()), "1 to 5 axes");
  if (stride.size() != shape.size()) {
    refuse("stride", fmt::format("{} axes", stride.size()), fmt::format("{} axes, as in shape", shape.size()));
  }
  Tensor view;
  view.data = const_cast<void*>(data);  // NOLINT(cppcoreguidelines-pro-type-const-cast): inputs are only read
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
  std::copy(stride.begin(), stride.end(), view.stride.begin());
  return view;
}

Tensor Tensor::of(const std::vector<float>& values, std::initializer_list<int64_t> shape) {
  return view_of(values.data(), values.size(), DType::f32, shape);
}

Tensor Tensor::of(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
  return view_of(values.data(), values.size(), DType::i32, shape);
}

Tensor Tensor::of(const std::vector<int64_t>& values, std::initializer_list<int64_t> shape) {
  return view_of(values.data(), values.size(), DType::i64, shape);
}

int64_t Tensor::num_elements() const {
  int64_t count = rank == 0 ? 0 : 1;
  for (int32_t axis = 0; axis < rank; ++axis) count *= shape[axis];
  return count;
}

Tensor Tensor::swap_axes(int32_t a, int32_t b) const {
  for (const int32_t axis : {a, b}) {
    if (axis < 0 || axis >= rank) refuse("axis", axis, fmt::format("0 to {}", rank - 1));
  }
  Tensor view = *this;
  std::swap(view.shape[a], view.shape[b]);
  std::swap(view.stride[a], view.stride[b]);
  return view;
}

Tensor Tensor::slice(int32_t axis, int64_t begin, int64_t end) const {
  if (axis < 0 || axis >= rank) refuse("axis", axis, fmt::format("0 to {}", rank - 1));
  if (begin < 0 || end < begin || end > shape[axis]) {
    refuse("slice", fmt::format("[{}, {})", begin, end), fmt::format("a range within [0, {})", shape[axis]));
  }
  Tensor view = *this;
  view.data = static_cast<char*>(data) + begin * stride[axis] * size_bytes(dtype);
  view.shape[axis] = end - begin;
  return view;
}

std::string Tensor::describe() const {
  if (!is_given()) return "nothing";
  return fmt::format("{}[{}]", to_string(dtype), fmt::join(shape.begin(), shape.begin() + rank, ", "));
}

}  // namespace qkv
