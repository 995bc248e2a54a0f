#include "cuda/tensor_map.hpp"

#include "jit/driver.hpp"

namespace qkv::cuda {

jit::CUtensorMap make_tensor_map(const void* data, DType dtype, const std::array<MapAxis, 5>& axes,
                                 jit::CUtensorMapL2promotion promotion, const char* name) {
  constexpr uint32_t kRank = 5;
  constexpr uint64_t kElementBytes = 2;
  uint64_t extents[kRank];
  uint64_t strides[kRank - 1];
  uint32_t boxes[kRank];
  uint32_t steps[kRank];
  for (uint32_t axis = 0; axis < kRank; ++axis) {
    extents[axis] = static_cast<uint64_t>(axes[axis].extent);
    boxes[axis] = static_cast<uint32_t>(axes[axis].box);
    steps[axis] = 1;
    // The stride of an axis of extent 1 means nothing, yet the driver refuses one that 16 bytes do not divide.
    const bool unused = axes[axis].extent == 1;
    if (axis > 0) strides[axis - 1] = unused ? 16 : static_cast<uint64_t>(axes[axis].stride) * kElementBytes;
  }
  jit::CUtensorMap map;
  const auto type = dtype == DType::bf16 ? jit::CUtensorMapDataType::bfloat16 : jit::CUtensorMapDataType::float16;
  jit::check(
      jit::driver().tensor_map_encode_tiled(&map, type, kRank, const_cast<void*>(data), extents, strides, boxes, steps,
                                            jit::CUtensorMapInterleave::none, jit::CUtensorMapSwizzle::bytes_128,
                                            promotion, jit::CUtensorMapFloatOOBfill::zeros),
      "cuTensorMapEncodeTiled", name);
  return map;
}

}  // namespace qkv::cuda
