#include "qkv/tensor.hpp"

#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include "core/checks.hpp"
#include "core/index/paging.hpp"
#include "qkv/dlpack.hpp"

namespace qkv {
namespace {

TEST(tensor, views_share_data) {
  float data[24] = {};
  const Tensor tensor = Tensor::contiguous(data, DType::f32, {2, 3, 4});
  EXPECT_EQ(tensor.num_elements(), 24);
  EXPECT_EQ(tensor.stride[0], 12);
  EXPECT_EQ(tensor.stride[2], 1);
  EXPECT_EQ(tensor.describe(), "f32[2, 3, 4]");
  const Tensor swapped = tensor.swap_axes(0, 1);
  EXPECT_EQ(swapped.describe(), "f32[3, 2, 4]");
  EXPECT_EQ(swapped.stride[0], 4);
  const Tensor part = tensor.slice(1, 1, 3);
  EXPECT_EQ(part.describe(), "f32[2, 2, 4]");
  EXPECT_EQ(part.data, data + 4);
  EXPECT_THROW((void)tensor.slice(1, 2, 4), Error);
  EXPECT_THROW((void)tensor.slice(3, 0, 1), Error);
  EXPECT_THROW((void)tensor.swap_axes(0, 3), Error);
  EXPECT_FALSE(Tensor{}.is_given());
  EXPECT_TRUE(Tensor::contiguous(nullptr, DType::i32, {0}).is_given());
}

TEST(tensor, a_vector_is_viewed_in_a_shape_of_its_size) {
  const std::vector<int64_t> values = {1, 2, 3, 4, 5, 6};
  const Tensor tensor = Tensor::of(values, {2, 3});
  EXPECT_EQ(tensor.describe(), "i64[2, 3]");
  EXPECT_EQ(tensor.data, values.data());
  EXPECT_EQ(Tensor::of(std::vector<float>{}, {0}).dtype, DType::f32);
  EXPECT_THROW(Tensor::of(values, {2, 4}), Error);
}

TEST(tensor, sizes_and_names_of_dtypes) {
  EXPECT_EQ(size_bytes(DType::f8e4m3), 1);
  EXPECT_EQ(size_bytes(DType::i8), 1);
  EXPECT_EQ(size_bytes(DType::bf16), 2);
  EXPECT_EQ(size_bytes(DType::i64), 8);
  EXPECT_EQ(to_string(DType::f16), "f16");
}

TEST(tensor, a_written_view_may_not_overlap_itself) {
  float data[24] = {};
  check_writable_layout(Tensor::contiguous(data, DType::f32, {2, 3, 4}), "out");
  check_writable_layout(Tensor::strided(data, DType::f32, {2, 3}, {1, 8}), "out");
  check_writable_layout(Tensor::strided(data, DType::f32, {1, 4}, {0, 1}), "out");  // a size-1 axis has no stride
  EXPECT_THROW(check_writable_layout(Tensor::strided(data, DType::f32, {2, 4}, {0, 1}), "out"), Error);
  EXPECT_THROW(check_writable_layout(Tensor::strided(data, DType::f32, {2, 4}, {3, 1}), "out"), Error);
}

TEST(dlpack, there_and_back_without_a_copy) {
  uint16_t data[12] = {};
  Tensor tensor = Tensor::strided(data, DType::bf16, {3, 2}, {4, 1});
  const DLTensor there = to_dlpack(tensor);
  EXPECT_EQ(there.dtype.code, kDLBfloat);
  const Tensor back = from_dlpack(there);
  EXPECT_EQ(back.data, data);
  EXPECT_EQ(back.dtype, DType::bf16);
  EXPECT_EQ(back.shape[0], 3);
  EXPECT_EQ(back.stride[0], 4);
}

TEST(dlpack, bytes_with_a_sign_are_i8_and_others_nothing) {
  int8_t data[12] = {};
  Tensor tensor = Tensor::contiguous(data, DType::i8, {3, 4});
  DLTensor there = to_dlpack(tensor);
  EXPECT_EQ(there.dtype.code, kDLInt);
  EXPECT_EQ(there.dtype.bits, 8);
  EXPECT_EQ(from_dlpack(there).describe(), "i8[3, 4]");
  there.dtype.code = kDLUInt;
  EXPECT_THROW(from_dlpack(there), Error);
}

TEST(dlpack, row_major_without_strides_and_with_an_offset) {
  int32_t data[12] = {};
  int64_t shape[2] = {2, 3};
  DLTensor source{};
  source.data = data;
  source.device = {kDLCPU, 0};
  source.ndim = 2;
  source.dtype = {kDLInt, 32, 1};
  source.shape = shape;
  source.byte_offset = 8;
  const Tensor tensor = from_dlpack(source);
  EXPECT_EQ(tensor.data, data + 2);
  EXPECT_EQ(tensor.stride[0], 3);
  source.dtype = {kDLFloat, 64, 1};
  EXPECT_THROW(from_dlpack(source), Error);
  source.dtype = {kDLInt, 32, 1};
  source.ndim = 6;
  EXPECT_THROW(from_dlpack(source), Error);
}

TEST(paging, slots_and_pages) {
  EXPECT_EQ(index::num_pages(0, 16), 0);
  EXPECT_EQ(index::num_pages(16, 16), 1);
  EXPECT_EQ(index::num_pages(17, 16), 2);
  EXPECT_EQ(index::num_pages(INT32_MAX, 1), INT32_MAX);
  for (int32_t position = 0; position < 100; ++position) {
    for (const int32_t page_size : {1, 3, 16}) {
      EXPECT_EQ(index::slot(index::page_index(position, page_size), index::page_offset(position, page_size), page_size),
                position);
    }
  }
  EXPECT_EQ(index::slot(INT32_MAX, 15, 16), int64_t{INT32_MAX} * 16 + 15);
}

}  // namespace
}  // namespace qkv
