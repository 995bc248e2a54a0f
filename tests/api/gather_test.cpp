// gather_cache against a plain loop: any strides, pages and starts.
#include <cstring>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using testing::view;

// Three pages of 4 tokens; request 0 owns pages 2 and 0, request 1 page 1. A row's value says where it lies.
struct Pages {
  explicit Pages(DType dtype = DType::f32) : tensor(dtype, {3, 4, 2, 8}) {
    for (int64_t p = 0; p < 3; ++p) {
      for (int64_t t = 0; t < 4; ++t) {
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t d = 0; d < 8; ++d) {
            tools::store(tensor.view(), {p, t, h, d}, static_cast<float>(((p * 4 + t) * 2 + h) * 8 + d));
          }
        }
      }
    }
  }
  tools::OwnedTensor tensor;
  std::vector<int32_t> table = {2, 0, -1, 1, -7, -7};  // entries that nobody needs are junk
  Tensor block_table() const { return Tensor::contiguous(table.data(), DType::i32, {2, 3}); }
};

TEST(gather_cache, rows_begin_at_each_requests_own_start) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Pages pages(dtype);
    const std::vector<int32_t> starts = {3, 1};
    const std::vector<int32_t> cu_seq_lens = {0, 4, 6};
    tools::OwnedTensor rows(dtype, {7, 2, 8});
    gather_cache(pages.tensor.view(), pages.block_table(), view(starts), view(cu_seq_lens), rows.view());
    const std::vector<std::pair<int64_t, int64_t>> expected = {{2, 3}, {0, 0}, {0, 1}, {0, 2}, {1, 1}, {1, 2}};
    for (int64_t r = 0; r < 6; ++r) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 8; ++d) {
          EXPECT_EQ(tools::load(rows.view(), {r, h, d}),
                    tools::load(pages.tensor.view(), {expected[r].first, expected[r].second, h, d}));
        }
      }
    }
    EXPECT_TRUE(std::isnan(tools::load(rows.view(), {6, 0, 0})));
    EXPECT_TRUE(rows.buffer().guards_intact());
  }
}

TEST(gather_cache, latents_have_no_head_axis_and_rows_may_be_strided) {
  const Pages pages;
  Tensor latents = pages.tensor.view().slice(2, 1, 2);  // head 1 alone
  latents = Tensor::strided(latents.data, latents.dtype, {3, 4, 8}, {64, 16, 1});
  const std::vector<int32_t> starts = {0, 0};
  const std::vector<int32_t> cu_seq_lens = {0, 2, 2};
  tools::OwnedTensor memory(DType::f32, {2, 20});
  const Tensor rows = memory.view().slice(1, 4, 12);
  gather_cache(latents, pages.block_table(), view(starts), view(cu_seq_lens), rows);
  for (int64_t d = 0; d < 8; ++d) {
    EXPECT_EQ(tools::load(rows, {1, d}), tools::load(pages.tensor.view(), {2, 1, 1, d}));
  }
  EXPECT_TRUE(std::isnan(tools::load(memory.view(), {1, 12})));
}

TEST(gather_cache, one_row_spreads_over_all_heads) {
  const Pages pages;
  Tensor spread = pages.tensor.view();
  spread.shape[2] = 5;
  spread.stride[2] = 0;
  const std::vector<int32_t> starts = {2, 0};
  const std::vector<int32_t> cu_seq_lens = {0, 1, 1};
  tools::OwnedTensor rows(DType::f32, {1, 5, 8});
  gather_cache(spread, pages.block_table(), view(starts), view(cu_seq_lens), rows.view());
  for (int64_t h = 0; h < 5; ++h) EXPECT_EQ(tools::load(rows.view(), {0, h, 3}), tools::load(spread, {2, 2, 0, 3}));
}

TEST(gather_cache, pages_of_8_bits_are_copied_or_widened) {
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::i8}) {
    const tools::OwnedTensor pages(dtype, {2, 4, 6});
    for (int64_t i = 0; i < 48; ++i)
      tools::store(pages.view(), {i / 24, i / 6 % 4, i % 6}, 0.25F * static_cast<float>(i - 20));
    const std::vector<int32_t> table = {1, 0}, starts = {1}, cu_seq_lens = {0, 6};
    const std::vector<float> scale = {0.3F};
    const Tensor block_table = Tensor::of(table, {1, 2});
    const tools::OwnedTensor copied(dtype, {6, 6}), widened(DType::bf16, {6, 6});
    gather_cache(pages.view(), block_table, view(starts), view(cu_seq_lens), copied.view());
    gather_cache(pages.view(), block_table, view(starts), view(cu_seq_lens), widened.view(), {}, view(scale, {1}));
    const tools::OwnedTensor rounded(DType::bf16, {1});
    for (int64_t row = 0; row < 6; ++row) {
      const int64_t page = row + 1 < 4 ? 1 : 0;
      for (int64_t d = 0; d < 6; ++d) {
        const float element = tools::load(pages.view(), {page, (row + 1) % 4, d});
        EXPECT_EQ(tools::load(copied.view(), {row, d}), element);
        tools::store(rounded.view(), {0}, element * scale[0]);
        EXPECT_EQ(tools::load(widened.view(), {row, d}), tools::load(rounded.view(), {0}));
      }
    }
    const auto refused = [&](const tools::OwnedTensor& rows, const Tensor& given, ErrorCode code) {
      expect_refused(
          [&] { gather_cache(pages.view(), block_table, view(starts), view(cu_seq_lens), rows.view(), {}, given); },
          code, "scale");
    };
    refused(widened, {}, ErrorCode::invalid_argument);
    refused(copied, view(scale, {1}), ErrorCode::mismatch);
  }
}

TEST(gather_cache, what_does_not_fit_is_refused_by_name) {
  const Pages pages;
  tools::OwnedTensor rows(DType::f32, {8, 2, 8});
  const auto gather = [&](std::vector<int32_t> starts, std::vector<int32_t> sums) {
    gather_cache(pages.tensor.view(), pages.block_table(), view(starts), view(sums), rows.view());
  };
  expect_refused([&] { gather({0, 0}, {0, 9, 9}); }, ErrorCode::invalid_argument, "block_table[0, 2]");
  expect_refused([&] { gather({0, 4}, {0, 0, 1}); }, ErrorCode::invalid_argument, "block_table[1, 1]");
  expect_refused([&] { gather({0, 12}, {0, 0, 1}); }, ErrorCode::invalid_argument, "block_table");
  expect_refused([&] { gather({-1, 0}, {0, 1, 1}); }, ErrorCode::invalid_argument, "starts[0]");
  expect_refused([&] { gather({0, 0}, {0, 2, 1}); }, ErrorCode::invalid_argument, "cu_seq_lens[2]");
  expect_refused([&] { gather({0, 0}, {0, 2}); }, ErrorCode::mismatch, "cu_seq_lens");
  const std::vector<int32_t> starts = {0, 0};
  const std::vector<int32_t> sums = {0, 8, 8};
  tools::OwnedTensor narrow(DType::f32, {7, 2, 8});
  expect_refused(
      [&] { gather_cache(pages.tensor.view(), pages.block_table(), view(starts), view(sums), narrow.view()); },
      ErrorCode::mismatch, "rows");
  tools::OwnedTensor halves(DType::f16, {8, 2, 8});
  expect_refused(
      [&] { gather_cache(pages.tensor.view(), pages.block_table(), view(starts), view(sums), halves.view()); },
      ErrorCode::mismatch, "rows");
  const std::vector<int32_t> far = {2, 3, 0, 0, 0, 0};
  expect_refused(
      [&] {
        gather_cache(pages.tensor.view(), Tensor::contiguous(far.data(), DType::i32, {2, 3}), view(starts), view(sums),
                     rows.view());
      },
      ErrorCode::mismatch, "block_table");
  EXPECT_TRUE(std::isnan(tools::load(rows.view(), {0, 0, 0})));
}

}  // namespace
}  // namespace qkv
