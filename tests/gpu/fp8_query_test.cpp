// Queries of 8-bit floats on a GPU: Hopper's tensor cores multiply them with 8-bit caches; other layers and decode
// widen them. Skipped where there is no GPU.
#include <cmath>
#include <numeric>

#include "core/float8.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::view;

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_fp8_query : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

tools::Case fp8(KvScales scales, std::vector<int32_t> q, std::vector<int32_t> kv, int32_t head_dim = 128) {
  auto c = case_of(8, 2, head_dim, std::move(q), std::move(kv));
  c.layer.query_dtype = c.layer.kv_dtype = DType::f8e4m3;
  c.layer.kv_scales = scales;
  return c;
}

void expect_agrees_on_gpu(const tools::Case& c) { EXPECT_EQ(tools::failure_of(c, kGpu), "") << tools::describe(c); }

class gpu_fp8_query_with_kv_scales : public gpu_fp8_query, public ::testing::WithParamInterface<KvScales> {};
INSTANTIATE_TEST_SUITE_P(of, gpu_fp8_query_with_kv_scales,
                         ::testing::Values(KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head,
                                           KvScales::per_token_head));

TEST_P(gpu_fp8_query_with_kv_scales, queries_have_scales_of_every_granularity) {
  for (const KvScales of_query : {KvScales::per_tensor, KvScales::per_head, KvScales::per_request_head}) {
    auto c = fp8(GetParam(), {1, 3, 40, 150, 1, 300}, {5000, 33, 200, 150, 0, 1500});
    c.query_scales = of_query;
    expect_agrees_on_gpu(c);
  }
}

// The head sizes of the Hopper kernel: each layer is two kernels to compile, so that they are tests of their own.
class gpu_fp8_query_of : public gpu_fp8_query, public ::testing::WithParamInterface<int32_t> {};
INSTANTIATE_TEST_SUITE_P(head_dim, gpu_fp8_query_of, ::testing::Values(64, 128, 256));

// Steps cut off within a page, long and short.
TEST_P(gpu_fp8_query_of, pages_and_groups) {
  for (const int32_t page_size : {16, 48, 64, 256}) {
    auto c = fp8(KvScales::per_head, {70, 129, 64, 17}, {70, 200, 333, 17}, GetParam());
    c.layer.num_kv_heads = page_size == 64 ? 1 : 8;
    c.layer.cache->page_size = page_size;
    c.layout.interleaved = page_size == 48;
    expect_agrees_on_gpu(c);
  }
  auto c = fp8(KvScales::per_head, {90, 20}, {90, 300}, GetParam());  // groups that 64 rows are no multiple of
  c.layer.num_q_heads = 10;
  expect_agrees_on_gpu(c);
}

TEST_P(gpu_fp8_query_of, masks_and_score_terms) {
  for (const Mask& mask : {mask::everything(), mask::causal(), mask::window(32, 64), mask::document() & mask::causal(),
                           mask::per_request_causal() & mask::window(30, 30)}) {
    auto c = fp8(KvScales::per_request_head, {129, 64, 80, 0, 33}, {64, 300, 500, 7, 33}, GetParam());
    c.query_scales = KvScales::per_request_head;
    c.layer.mask = mask;
    expect_agrees_on_gpu(c);
    c.layer.sinks.assign(8, 0.5F);
    c.layer.softcap = 20;
    c.layer.alibi_slopes.assign(8, 0.05F);
    c.layer.scale = -0.05F;
    expect_agrees_on_gpu(c);
  }
}

TEST_P(gpu_fp8_query_of, every_output) {
  for (const DType dtype : {DType::f32, DType::f16, DType::f8e4m3, DType::f8e5m2}) {
    auto c = fp8(KvScales::per_tensor, {100, 3}, {400, 20'000}, GetParam());  // the second is split
    c.layer.output_dtype = dtype;
    expect_agrees_on_gpu(c);
  }
}

// Layers of 8-bit queries that the Hopper kernel leaves to the one that widens.
TEST_F(gpu_fp8_query, other_head_sizes_and_pages) {
  for (const auto& [head_dim, page_size] : {std::pair{96, 16}, {192, 64}, {512, 16}, {128, 7}}) {
    auto c = fp8(KvScales::per_head, {70, 3, 64, 17}, {70, 200, 333, 17}, head_dim);
    c.layer.cache->page_size = page_size;
    expect_agrees_on_gpu(c);
  }
}

// Bytes that are NaN behind the last key and in hidden keys and values do not reach rows that do not see them: CaseData
// fills unowned memory with NaN, and this puts some into a hidden value.
TEST_P(gpu_fp8_query_of, casebook_044_hidden_nan_does_not_spread) {
  const int32_t head_dim = GetParam();
  auto c = fp8(KvScales::per_tensor, {140}, {140}, head_dim);
  tools::CaseData data(c);
  const Attention attention(c.layer, kGpu);
  const Plan plan = attention.plan(data.batch());
  tools::store(data.value.view(), {100, 1, 5}, NAN);  // rows 0 to 99 do not see it
  const tools::Placed query(data.query, kGpu), key(data.key, kGpu), value(data.value, kGpu),
      key_pages(data.key_pages, kGpu), value_pages(data.value_pages, kGpu), key_scale(data.key_scale, kGpu),
      value_scale(data.value_scale, kGpu), query_scale(data.query_scale, kGpu);
  tools::OwnedTensor out(DType::bf16, {140, 8, head_dim});
  const tools::Placed placed_out(out, kGpu);
  const KvCache cache{key_pages.on_device(data.key_cache), value_pages.on_device(data.value_cache), key_scale.view(),
                      value_scale.view()};
  attention.update_cache(key.view(), value.view(), cache, plan);
  attention.forward(query.view(), cache, plan, placed_out.view(), {}, {}, {}, query_scale.view());
  placed_out.fetch();
  for (int64_t t = 0; t < 140; ++t) {
    for (int64_t h = 0; h < 8; ++h) {
      const bool is_nan = std::isnan(tools::load(out.view(), {t, h, 5}));
      ASSERT_EQ(is_nan, t >= 100 && h >= 4) << head_dim << " " << t << " " << h;
    }
  }
}

// Rows of unit-normal queries over a long context, of which one key gets about half of all weight: what is small beside
// it counts as much as it does. Values have a mean, so that it shows when small weights are lost. The kernel may err by
// no more than the rounding of its inputs does.
class Needle {
 public:
  Needle(int32_t head_dim, int32_t num_keys)
      : dim_(head_dim), num_keys_(num_keys), query_(kTokens * dim_), key_(num_keys * dim_), value_(num_keys * dim_) {
    tools::Draw draw(7, head_dim);
    for (float& element : query_) element = draw.normal();
    for (float& element : key_) element = draw.normal();
    for (float& element : value_) element = 0.5F + draw.normal();
    const float score = std::log(static_cast<float>(num_keys)) + 0.5F;
    for (int64_t d = 0; d < dim_; ++d) {
      float sum = 0;
      for (int64_t t = 0; t < kTokens; ++t) sum += query_[t * dim_ + d];
      key_[(num_keys / 2 + 77) * dim_ + d] = sum * score / std::sqrt(static_cast<float>(dim_));
    }
    table_.resize(num_keys / kPage);
    std::iota(table_.begin(), table_.end(), 0);
    lengths_ = {num_keys};
    batch_.query_start_loc = view(starts_);
    batch_.seq_lens = view(lengths_);
    batch_.block_table = Tensor::contiguous(table_.data(), DType::i32, {1, num_keys / kPage});
    layer_ = testing::layer_of(1, 1, head_dim);
    layer_.query_dtype = layer_.kv_dtype = DType::f8e4m3;
    layer_.output_dtype = DType::f32;
    layer_.mask = mask::everything();
    layer_.cache = CacheSpec{kPage};
    layer_.kv_scales = KvScales::per_tensor;
  }

  void expect_errs_less_than_rounding() {
    const std::vector<uint8_t> query = rounded(query_, 0), key = rounded(key_, 1), value = rounded(value_, 2);
    const std::vector<float> out = forward(query, key, value);
    const auto of_rounded =
        reference::attention(layer_, batch_, rows(query.data(), {}),
                             {pages(key.data(), {}), pages(value.data(), {}), scale(1), scale(2)}, scale(0));
    LayerSpec exact_layer = layer_;
    exact_layer.query_dtype = exact_layer.kv_dtype = DType::f32;
    exact_layer.kv_scales = KvScales::none;
    exact_layer.cache.reset();
    const auto exact = reference::attention(exact_layer, batch_, view(query_, {kTokens, 1, dim_}),
                                            view(key_, {num_keys_, 1, dim_}), view(value_, {num_keys_, 1, dim_}));
    double of_kernel = 0, of_inputs = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      of_kernel += std::pow(out[i] - of_rounded.out[i], 2);
      of_inputs += std::pow(of_rounded.out[i] - exact.out[i], 2);
    }
    EXPECT_TRUE(of_kernel <= of_inputs) << std::sqrt(of_kernel) << " " << std::sqrt(of_inputs);
    ::testing::Test::RecordProperty("share_of_rounding", std::to_string(std::sqrt(of_kernel / of_inputs)));
  }

 private:
  static constexpr int32_t kTokens = 17;  // more than few rows
  static constexpr int32_t kPage = 64;

  Tensor scale(int64_t i) const { return view(scales_, {3}).slice(0, i, i + 1); }
  Tensor rows(const void* data, Device device) const {
    return Tensor::contiguous(data, DType::f8e4m3, {kTokens, 1, dim_}, device);
  }
  Tensor pages(const void* data, Device device) const {
    return Tensor::contiguous(data, DType::f8e4m3, {num_keys_ / kPage, kPage, 1, dim_}, device);
  }
  std::vector<uint8_t> rounded(const std::vector<float>& values, size_t scale) const {
    std::vector<uint8_t> bytes(values.size());
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = float8_from_f32(DType::f8e4m3, values[i] / scales_[scale]);
    return bytes;
  }
  template <class Element>
  static DeviceMemory copy(const std::vector<Element>& values) {
    DeviceMemory memory(kGpu, static_cast<int64_t>(values.size() * sizeof(Element)));
    memory.copy_from_host(values.data());
    return memory;
  }

  std::vector<float> forward(const std::vector<uint8_t>& query, const std::vector<uint8_t>& key,
                             const std::vector<uint8_t>& value) const {
    std::vector<float> out(kTokens * dim_, NAN);
    const DeviceMemory on_gpu[] = {copy(query), copy(key), copy(value), copy(scales_), copy(out)};
    const Tensor scales = Tensor::contiguous(on_gpu[3].data(), DType::f32, {3}, kGpu);
    const Attention attention(layer_, kGpu);
    const Plan plan = attention.plan(batch_);
    const KvCache cache{pages(on_gpu[1].data(), kGpu), pages(on_gpu[2].data(), kGpu), scales.slice(0, 1, 2),
                        scales.slice(0, 2, 3)};
    attention.forward(rows(on_gpu[0].data(), kGpu), cache, plan,
                      Tensor::contiguous(on_gpu[4].data(), DType::f32, {kTokens, 1, dim_}, kGpu), {}, {}, {},
                      scales.slice(0, 0, 1));
    on_gpu[4].copy_to_host(out.data());
    return out;
  }

  int64_t dim_, num_keys_;
  std::vector<float> query_, key_, value_;
  const std::vector<float> scales_ = {5.0F / 448, 24.0F / 448, 6.0F / 448};
  const std::vector<int32_t> starts_ = {0, kTokens};
  std::vector<int32_t> lengths_, table_;
  Batch batch_;
  LayerSpec layer_;
};

TEST_F(gpu_fp8_query, a_needle_in_128k_keys_costs_no_more_than_rounding_the_inputs) {
  Needle(128, 131072).expect_errs_less_than_rounding();
}
TEST_F(gpu_fp8_query, a_needle_of_256_columns_costs_no_more_than_rounding_the_inputs) {
  Needle(256, 32768).expect_errs_less_than_rounding();
}

}  // namespace
}  // namespace qkv
