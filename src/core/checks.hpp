// How the library refuses: one call throws, the others are the checks that several rooms need.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "qkv/status.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

// Throws invalid_argument "argument: got VALUE; allowed: ALLOWED".
template <class Value>
[[noreturn]] void refuse(std::string argument, const Value& value, std::string allowed,
                         ErrorCode code = ErrorCode::invalid_argument) {
  throw Error(code, std::move(argument), fmt::format("{}", value), std::move(allowed));
}

// The checks below throw; `name` is the argument's name in the message.
void check_given(const Tensor& tensor, const char* name, const char* what_for);
void check_rank(const Tensor& tensor, const char* name, int32_t rank, const char* axes);
void check_extent(const Tensor& tensor, const char* name, int32_t axis, int64_t extent, const char* meaning);
void check_extent_at_least(const Tensor& tensor, const char* name, int32_t axis, int64_t extent, const char* meaning);
void check_dtype(const Tensor& tensor, const char* name, DType dtype);
void check_float16_or_32(const Tensor& tensor, const char* name);
void check_last_axis_contiguous(const Tensor& tensor, const char* name);
// Row-major without gaps.
void check_contiguous(const Tensor& tensor, const char* name);
void check_host(const Tensor& tensor, const char* name);
void check_device(const Tensor& tensor, const char* name, Device device);
// Rows that kernels read with wide loads: address and strides (of axes longer than 1, the last apart) are multiples.
void check_aligned(const Tensor& tensor, const char* name, int64_t alignment_bytes);
// Writing through a view needs a place of its own for every element.
void check_writable_layout(const Tensor& tensor, const char* name);

}  // namespace qkv
