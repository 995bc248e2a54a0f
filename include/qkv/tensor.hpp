// Strided views of memory that the caller owns. The library never owns or copies tensor data.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/export.hpp"

namespace qkv {

// f8e4m3: up to 448, no infinities (torch.float8_e4m3fn). f8e5m2: up to 57344. Both for queries, keys, values and
// outputs, i8 for keys and values, see fp8.md.
enum class DType : uint8_t { f32, f16, bf16, f8e4m3, i32, i64, f8e5m2, i8 };

QKV_EXPORT int32_t size_bytes(DType dtype);
QKV_EXPORT std::string_view to_string(DType dtype);

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int32_t index = 0;
  bool operator==(const Device&) const = default;
};

QKV_EXPORT std::string to_string(Device device);

// A view: element (i0, i1, …) lies at data + (i0·stride[0] + i1·stride[1] + …)·size_bytes(dtype). Strides count
// elements; the stride of an axis of size 1 is ignored. A default-constructed Tensor means "not given".
// Tensors that a call only reads are never written through, so const memory may be viewed.
struct QKV_EXPORT Tensor {
  static constexpr int32_t kMaxRank = 5;

  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};

  // A row-major view.
  static Tensor contiguous(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {});
  // A view with strides of the caller's own.
  static Tensor strided(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                        std::initializer_list<int64_t> stride, Device device = {});

  // A row-major view of a vector of float, int32_t or int64_t; the shape must have as many elements.
  static Tensor of(const std::vector<float>& values, std::initializer_list<int64_t> shape);
  static Tensor of(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape);
  static Tensor of(const std::vector<int64_t>& values, std::initializer_list<int64_t> shape);

  bool is_given() const { return rank != 0; }
  int64_t num_elements() const;
  // The same data with axis `a` and axis `b` exchanged.
  Tensor swap_axes(int32_t a, int32_t b) const;
  // Elements [begin, end) of one axis.
  Tensor slice(int32_t axis, int64_t begin, int64_t end) const;
  // "bf16[8, 16, 2, 64]"
  std::string describe() const;
};

}  // namespace qkv
