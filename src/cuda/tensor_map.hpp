// Descriptions of tensors for the bulk copies of Hopper (TMA).
#pragma once

#include <array>
#include <cstdint>

#include "jit/cuda_api.hpp"
#include "qkv/tensor.hpp"

namespace qkv::cuda {

struct MapAxis {
  int64_t extent;
  int64_t stride;  // in elements; of the innermost axis 1, of an axis of extent 1 whatever it says
  int32_t box;     // elements of one copy
};

// Five axes of 16-bit or 8-bit elements, innermost first, with the swizzle of the innermost box (32, 64 or 128 bytes;
// none where it has 16); what lies behind an edge reads as zeros. A tensor without elements gets a map that must not be
// used.
jit::CUtensorMap make_tensor_map(const void* data, DType dtype, const std::array<MapAxis, 5>& axes,
                                 jit::CUtensorMapL2promotion promotion, const char* name);

}  // namespace qkv::cuda
