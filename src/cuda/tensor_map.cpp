#include "cuda/tensor_map.hpp"

#include <algorithm>
#include <cstddef>

#include "core/eight_bit.hpp"
#include "jit/driver.hpp"

namespace qkv::cuda {
namespace {

jit::CUtensorMapSwizzle swizzle_of(uint64_t bytes) {
  switch (bytes) {
    case 128:
      return jit::CUtensorMapSwizzle::bytes_128;
    case 64:
      return jit::CUtensorMapSwizzle::bytes_64;
    case 32:
      return jit::CUtensorMapSwizzle::bytes_32;
    default:
      return jit::CUtensorMapSwizzle::none;
  }
}

// 8-bit elements are copied as bytes.
jit::CUtensorMapDataType type_of(DType dtype) {
  if (is_8bit(dtype)) return jit::CUtensorMapDataType::uint8;
  return dtype == DType::bf16 ? jit::CUtensorMapDataType::bfloat16 : jit::CUtensorMapDataType::float16;
}

}  // namespace

jit::CUtensorMap make_tensor_map(const void* data, DType dtype, const std::array<MapAxis, 5>& axes,
                                 jit::CUtensorMapL2promotion promotion, const char* name) {
  constexpr uint32_t kRank = 5;
  const auto element_bytes = static_cast<uint64_t>(size_bytes(dtype));
  uint64_t extents[kRank];
  uint64_t strides[kRank - 1];
  uint32_t boxes[kRank];
  uint32_t steps[kRank];
  bool empty = false;
  for (uint32_t axis = 0; axis < kRank; ++axis) {
    empty |= axes[axis].extent == 0;
    extents[axis] = static_cast<uint64_t>(std::max<int64_t>(axes[axis].extent, 1));
    boxes[axis] = static_cast<uint32_t>(axes[axis].box);
    steps[axis] = 1;
    // The stride of an axis of extent 1 means nothing, yet the driver refuses one that 16 bytes do not divide.
    const bool unused = axes[axis].extent <= 1;
    if (axis > 0) strides[axis - 1] = unused ? 16 : static_cast<uint64_t>(axes[axis].stride) * element_bytes;
  }
  // The driver refuses extents of 0 and a null pointer, though nothing will be read.
  alignas(16) static constexpr std::byte kNothing[16] = {};
  const void* address = empty ? kNothing : data;
  jit::CUtensorMap map;
  jit::check(jit::driver().tensor_map_encode_tiled(&map, type_of(dtype), kRank, const_cast<void*>(address), extents,
                                                   strides, boxes, steps, jit::CUtensorMapInterleave::none,
                                                   swizzle_of(boxes[0] * element_bytes), promotion,
                                                   jit::CUtensorMapFloatOOBfill::zeros),
             "cuTensorMapEncodeTiled", name);
  return map;
}

}  // namespace qkv::cuda
