// Tensors to and from DLPack, without copies. Header-only: whoever includes it brings <dlpack/dlpack.h>.
#pragma once

#include <dlpack/dlpack.h>

#include <iterator>
#include <string>

#include "qkv/status.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

// Type codes of DLPack 1.1, which older headers don't name.
inline constexpr uint8_t kDlpackFloat8E4M3 = 10;
inline constexpr uint8_t kDlpackFloat8E5M2 = 12;

inline std::string dlpack_name(DLDataType dtype) {
  const char* kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string kind =
      dtype.code < std::size(kinds) ? kinds[dtype.code] : "code " + std::to_string(dtype.code) + " of bits ";
  return kind + std::to_string(dtype.bits) + (dtype.lanes == 1 ? "" : " x " + std::to_string(dtype.lanes));
}

// The tensor's shape and strides are copied into the view; the data stays the producer's.
inline Tensor from_dlpack(const DLTensor& source) {
  Tensor view;
  const auto is = [&](uint8_t code, uint8_t bits) { return source.dtype.code == code && source.dtype.bits == bits; };
  if (source.dtype.lanes == 1 && is(kDLFloat, 32)) {
    view.dtype = DType::f32;
  } else if (source.dtype.lanes == 1 && is(kDLFloat, 16)) {
    view.dtype = DType::f16;
  } else if (source.dtype.lanes == 1 && is(kDLBfloat, 16)) {
    view.dtype = DType::bf16;
  } else if (source.dtype.lanes == 1 && is(kDlpackFloat8E4M3, 8)) {
    view.dtype = DType::f8e4m3;
  } else if (source.dtype.lanes == 1 && is(kDlpackFloat8E5M2, 8)) {
    view.dtype = DType::f8e5m2;
  } else if (source.dtype.lanes == 1 && is(kDLInt, 8)) {
    view.dtype = DType::i8;
  } else if (source.dtype.lanes == 1 && is(kDLInt, 32)) {
    view.dtype = DType::i32;
  } else if (source.dtype.lanes == 1 && is(kDLInt, 64)) {
    view.dtype = DType::i64;
  } else {
    throw Error(ErrorCode::invalid_argument, "dlpack dtype", dlpack_name(source.dtype),
                "float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, int32 or int64");
  }
  if (source.device.device_type == kDLCPU || source.device.device_type == kDLCUDAHost) {
    view.device = {DeviceKind::cpu, 0};
  } else if (source.device.device_type == kDLCUDA) {
    view.device = {DeviceKind::cuda, source.device.device_id};
  } else {
    throw Error(ErrorCode::invalid_argument, "dlpack device",
                "type " + std::to_string(static_cast<int>(source.device.device_type)), "cpu or cuda");
  }
  if (source.ndim < 1 || source.ndim > Tensor::kMaxRank) {
    throw Error(ErrorCode::invalid_argument, "dlpack rank", std::to_string(source.ndim), "1 to 5");
  }
  view.data = static_cast<char*>(source.data) + source.byte_offset;
  view.rank = source.ndim;
  int64_t row_major = 1;
  for (int axis = source.ndim - 1; axis >= 0; --axis) {
    view.shape[axis] = source.shape[axis];
    view.stride[axis] = source.strides != nullptr ? source.strides[axis] : row_major;
    row_major *= source.shape[axis];
  }
  return view;
}

// Shape and strides point into `view`, which must outlive the result.
inline DLTensor to_dlpack(Tensor& view) {
  DLTensor result{};
  result.data = view.data;
  result.device = {view.device.kind == DeviceKind::cuda ? kDLCUDA : kDLCPU, view.device.index};
  result.ndim = view.rank;
  result.shape = view.shape.data();
  result.strides = view.stride.data();
  switch (view.dtype) {
    case DType::f32:
      result.dtype = {kDLFloat, 32, 1};
      break;
    case DType::f16:
      result.dtype = {kDLFloat, 16, 1};
      break;
    case DType::bf16:
      result.dtype = {kDLBfloat, 16, 1};
      break;
    case DType::i8:
      result.dtype = {kDLInt, 8, 1};
      break;
    case DType::i32:
      result.dtype = {kDLInt, 32, 1};
      break;
    case DType::i64:
      result.dtype = {kDLInt, 64, 1};
      break;
    case DType::f8e4m3:
      result.dtype = {kDlpackFloat8E4M3, 8, 1};
      break;
    case DType::f8e5m2:
      result.dtype = {kDlpackFloat8E5M2, 8, 1};
      break;
  }
  return result;
}

}  // namespace qkv
