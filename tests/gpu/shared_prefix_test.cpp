// Shared prefixes on a GPU: right, with every feature, and with the bits that each request has alone.
#include <algorithm>
#include <array>
#include <functional>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;
using testing::with;

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_shared_prefix : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

// Steps of one and two tokens and several lengths that share 2560 keys, behind one that shares nothing.
tools::Case decode_batch(int32_t num_q_heads = 4, int32_t num_kv_heads = 1, int32_t head_dim = 128) {
  auto c =
      case_of(num_q_heads, num_kv_heads, head_dim, {1, 1, 1, 2, 1, 2, 1}, {700, 2700, 2561, 2900, 3072, 2800, 3073});
  c.layer.query_dtype = c.layer.kv_dtype = DType::bf16;
  c.prefix_groups = {{{1, 2, 3, 4, 5, 6}, 2560}};
  c.prefix_sharing = PrefixSharing::always;
  return c;
}

int64_t num_shared_items(const tools::Case& c) {
  const tools::CaseData data(c);
  const PlanReport report = Attention(c.layer, kGpu).plan(data.batch()).report();
  return std::count_if(report.items.begin(), report.items.end(),
                       [](const PlanItem& item) { return item.requests.size() > 1; });
}

// failure_of also runs each request alone, and compares the bits.
void expect_shares_and_agrees(const tools::Case& c) {
  EXPECT_GT(num_shared_items(c), 0) << tools::describe(c);
  EXPECT_EQ(tools::failure_of(c, kGpu), "") << tools::describe(c);
}

TEST_F(gpu_shared_prefix, decode_steps_agree_with_the_definition_and_with_themselves_alone) {
  expect_shares_and_agrees(decode_batch());
  expect_shares_and_agrees(with(decode_batch(), [](LayerSpec& layer) {
    layer.query_dtype = layer.kv_dtype = DType::f16;
    layer.output_dtype = DType::f32;
  }));
}

// Tiles of 4, 8 and 16 rows, items of 32 and of 16; head sizes that only the sm_80 kernel runs.
TEST_F(gpu_shared_prefix, heads_and_sizes_of_every_kernel) {
  for (const auto& [num_q_heads, num_kv_heads, head_dim] :
       {std::array{2, 2, 128}, std::array{4, 2, 64}, std::array{8, 1, 128}, std::array{16, 1, 128},
        std::array{8, 1, 256}, std::array{4, 1, 256}, std::array{3, 1, 96}, std::array{4, 1, 72},
        std::array{5, 1, 512}}) {
    expect_shares_and_agrees(decode_batch(num_q_heads, num_kv_heads, head_dim));
  }
  expect_shares_and_agrees(with(decode_batch(4, 1, 192), [](LayerSpec& layer) { layer.head_dim_v = 128; }));
}

TEST_F(gpu_shared_prefix, pages_of_every_size) {
  for (const int32_t page_size : {1, 8, 64, 160}) {
    auto c = decode_batch();
    c.layer.cache = CacheSpec{page_size};
    expect_shares_and_agrees(c);
  }
}

TEST_F(gpu_shared_prefix, goes_with_every_term_of_the_score) {
  const std::vector<std::function<void(LayerSpec&)>> changes = {
      [](LayerSpec& layer) { layer.softcap = 5; },
      [](LayerSpec& layer) {
        layer.sinks = {0.5F, -INFINITY, 2, -1};
      },
      [](LayerSpec& layer) {
        layer.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
      },
      [](LayerSpec& layer) {
        layer.alibi_per_request = true;
        layer.softcap = 20;
      },
  };
  for (const auto& change : changes) {
    expect_shares_and_agrees(with(decode_batch(), change));
    expect_shares_and_agrees(with(decode_batch(4, 1, 72), change));
  }
}

TEST_F(gpu_shared_prefix, goes_with_masks) {
  for (const char* mask : {"causal & window(1900, 0)", "per_request_causal", "causal & kv_pos + q_head != 77",
                           "rswa(700)", "causal & ~(kv_pos == 100)"}) {
    const auto change = [&](LayerSpec& layer) { layer.mask = parse_mask(mask); };
    expect_shares_and_agrees(with(decode_batch(), change));
    expect_shares_and_agrees(with(decode_batch(4, 1, 72), change));
  }
}

// Documents of one request end elsewhere than those of another: then Hopper's lanes have other tiles, and the requests
// stay apart; the sm_80 kernel joins them.
TEST_F(gpu_shared_prefix, masks_that_differ_from_request_to_request) {
  const auto change = [&](LayerSpec& layer) { layer.mask = mask::document(); };
  expect_shares_and_agrees(with(decode_batch(4, 1, 72), change));
  EXPECT_EQ(tools::failure_of(with(decode_batch(), change), kGpu), "");
}

tools::Case of_8_bits(tools::Case c, DType dtype, KvScales scales) {
  c.layer.kv_dtype = dtype;
  c.layer.kv_scales = scales;
  return c;
}

// Of 512 or 1024 keys, which a split has at least.
TEST_F(gpu_shared_prefix, caches_of_8_bits_share) {
  for (const auto& [dtype, scales] : {std::pair{DType::f8e4m3, KvScales::per_head},
                                      {DType::f8e5m2, KvScales::per_tensor},
                                      {DType::i8, KvScales::per_head}}) {
    for (const auto& [num_q_heads, head_dim] : {std::array{4, 128}, {8, 64}, {1, 128}, {16, 128}, {4, 256}}) {
      expect_shares_and_agrees(of_8_bits(decode_batch(num_q_heads, 1, head_dim), dtype, scales));
    }
  }
  auto c = of_8_bits(decode_batch(), DType::f8e4m3, KvScales::per_head);
  c.layer.query_dtype = DType::f16;
  c.layer.softcap = 20;
  c.layer.alibi_slopes = {0.5F, 0.25F, 0.125F, 0.0625F};
  c.layer.mask = parse_mask("causal & kv_pos + q_head != 77");
  c.layer.cache->page_size = 8;
  expect_shares_and_agrees(c);
}

// In the sm_80 kernel, which runs head size 272, tokens may have scales, too.
TEST_F(gpu_shared_prefix, caches_whose_requests_have_scales_of_their_own_share_nothing) {
  for (const KvScales scales : {KvScales::per_tensor, KvScales::per_head, KvScales::per_token_head}) {
    expect_shares_and_agrees(of_8_bits(decode_batch(4, 1, 272), DType::f8e4m3, scales));
  }
  for (const int32_t head_dim : {128, 272}) {
    const tools::Case own = of_8_bits(decode_batch(4, 1, head_dim), DType::f8e4m3, KvScales::per_request_head);
    EXPECT_EQ(num_shared_items(own), 0);
    EXPECT_EQ(tools::failure_of(own, kGpu), "");
  }
}

TEST_F(gpu_shared_prefix, nested_groups_agree) {
  auto c = case_of(4, 1, 64, {1, 1, 1, 1, 1}, {4200, 4100, 4150, 4300, 4090});
  c.layer.query_dtype = c.layer.kv_dtype = DType::bf16;
  c.prefix_groups = {{{0, 1, 2, 3, 4}, 1296}, {{0, 1, 3}, 2704}, {{0, 3}, 3504}};
  c.prefix_sharing = PrefixSharing::always;
  expect_shares_and_agrees(c);
}

// Splits of more than a cluster holds, and prompts beside decode steps.
TEST_F(gpu_shared_prefix, long_prefixes_and_mixed_batches_agree) {
  auto c = case_of(4, 1, 64, {1, 70, 1, 2, 1, 9}, {21'000, 20'800, 20'600, 22'000, 33'000, 20'700});
  c.layer.query_dtype = c.layer.kv_dtype = DType::bf16;
  c.prefix_groups = {{{0, 1, 2, 3, 4, 5}, 20'000}};
  c.prefix_sharing = PrefixSharing::always;
  expect_shares_and_agrees(c);
}

TEST_F(gpu_shared_prefix, more_items_than_multiprocessors_agree) {
  std::vector<int32_t> q, kv, all;
  for (int32_t r = 0; r < 20; ++r) {
    q.push_back(1 + r % 2);
    kv.push_back(1280 + q.back() + r * 11);
    all.push_back(r);
  }
  auto c = case_of(32, 8, 64, q, kv);
  c.layer.query_dtype = c.layer.kv_dtype = DType::bf16;
  c.prefix_groups = {{all, 1280}};
  c.prefix_sharing = PrefixSharing::always;
  expect_shares_and_agrees(c);
}

// The bytes of `out`.
std::vector<std::byte> bits_of(tools::Case c, PrefixSharing sharing) {
  c.prefix_sharing = sharing;
  tools::CaseData data(c);
  const auto num_slots = static_cast<int64_t>(data.slot_mapping.size());
  cache_write(data.key.view(), data.value.view(), data.cache(),
              Tensor::contiguous(data.slot_mapping.data(), DType::i64, {num_slots}));
  std::vector<DeviceMemory> memories;
  const auto on_gpu = [&](Tensor tensor) {
    DeviceMemory& memory = memories.emplace_back(kGpu, tensor.num_elements() * size_bytes(tensor.dtype));
    memory.copy_from_host(tensor.data);
    tensor.data = memory.data();
    tensor.device = kGpu;
    return tensor;
  };
  const Attention attention(c.layer, kGpu);
  const KvCache cache{on_gpu(data.key_pages.view()), on_gpu(data.value_pages.view())};
  std::vector<std::byte> out(data.num_tokens * c.layer.num_q_heads * c.layer.value_dim() *
                             size_bytes(c.layer.out_dtype()));
  const Tensor result = on_gpu(
      Tensor::contiguous(out.data(), c.layer.out_dtype(), {data.num_tokens, c.layer.num_q_heads, c.layer.value_dim()}));
  attention.forward(on_gpu(data.query.view()), cache, attention.plan(data.batch()), result);
  memories[2].copy_to_host(out.data());
  return out;
}

// casebook 80 on the GPU.
TEST_F(gpu_shared_prefix, no_way_of_sharing_changes_a_bit) {
  for (const tools::Case& c : {decode_batch(), decode_batch(4, 1, 72)}) {
    const std::vector<std::byte> off = bits_of(c, PrefixSharing::off);
    EXPECT_EQ(bits_of(c, PrefixSharing::always), off);
    EXPECT_EQ(bits_of(c, PrefixSharing::automatic), off);
  }
}

TEST_F(gpu_shared_prefix, always_is_refused_where_no_two_requests_fit_an_item) {
  const auto c = decode_batch(40, 1, 64);
  const tools::CaseData data(c);
  testing::expect_refused([&] { Attention(c.layer, kGpu).plan(data.batch()); }, ErrorCode::unsupported,
                          "prefix_sharing");
}

}  // namespace
}  // namespace qkv
