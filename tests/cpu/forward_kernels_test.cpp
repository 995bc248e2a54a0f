// Both kernels of every instruction set of this CPU against the plain definition, over random tasks and at the edges.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/float16.hpp"
#include "cpu/forward_scene.hpp"
#include "cpu/kernels.hpp"
#include "qkv/status.hpp"

namespace qkv::cpu {
namespace {

using forward_test::Config;
using forward_test::kInfinity;
using forward_test::kNan;
using forward_test::Scene;

// One step of the output's format at the value's size.
float rounding_step(DType dtype, float value) {
  if (is_float8(dtype)) {
    const bool has_3_bits = dtype == DType::f8e4m3;
    return (has_3_bits ? 0x1p-3F : 0x1p-2F) * std::fabs(value) +
           (has_3_bits ? 0x1p-9F : 0x1p-16F) * forward_test::kOutScale;
  }
  const float relative = dtype == DType::f32 ? 0x1p-23F : dtype == DType::f16 ? 0x1p-10F : 0x1p-7F;
  return relative * std::fabs(value) + (dtype == DType::f16 ? 0x1p-24F : 0);
}

bool is_close(float actual, float expected, float tolerance) {
  if (std::isnan(expected)) return std::isnan(actual);
  if (std::isinf(expected)) return actual == expected;
  return std::fabs(actual - expected) <= tolerance;
}

// f32 arithmetic on scores of this size leaves this much in a weighted mean of standard normal values.
float tolerance_of(const Config& config) {
  float score = 4 * config.query_size;
  if (config.alibi) score += 0.5F * static_cast<float>(std::max(config.kv_len, 1));
  return 2e-6F + 8e-7F * score;
}

void expect_equal_to_plain(const Scene& scene, ForwardKernel kernel) {
  const Scene::Result expected = scene.run(forward_plain);
  const Scene::Result actual = scene.run(kernel);
  const Config& config = scene.config();
  const DType dtype = config.state ? DType::f32 : config.out_dtype;
  const float tolerance = tolerance_of(config);
  for (size_t i = 0; i < expected.out.size(); ++i) {
    ASSERT_TRUE(is_close(actual.out[i], expected.out[i], tolerance + rounding_step(dtype, expected.out[i])))
        << config << "\nrow " << i / config.head_dim_v << " dim " << i % config.head_dim_v << ": " << actual.out[i]
        << ", plain " << expected.out[i];
  }
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    ASSERT_TRUE(is_close(actual.lse[i], expected.lse[i], tolerance + rounding_step(DType::f32, expected.lse[i])))
        << config << "\nrow " << i << ": lse " << actual.lse[i] << ", plain " << expected.lse[i];
  }
}

void expect_same_bits(const float* actual, const float* expected, size_t count, const Config& config) {
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(actual[i]), std::bit_cast<uint32_t>(expected[i]))
        << config << "\nelement " << i << ": " << actual[i] << ", " << expected[i];
  }
}

Config random_config(uint32_t seed) {
  std::mt19937 random(seed);
  const auto pick = [&](auto... values) {
    const std::common_type_t<decltype(values)...> list[] = {values...};
    return list[random() % sizeof...(values)];
  };
  const auto dtype = [&] { return pick(DType::f32, DType::f16, DType::bf16); };
  Config c;
  c.seed = seed;
  c.head_dim = pick(8, 16, 40, 64, 64, 72, 80, 128, 128, 9, 67, 130, 256);
  c.head_dim_v = pick(c.head_dim, c.head_dim, 8, 33, 64, 96, 128, 11, 112, 257);
  c.group_size = pick(1, 1, 2, 3, 4, 4, 7, 8, 16, 71);
  c.num_tokens = c.group_size > 16 ? pick(1, 2) : pick(1, 1, 2, 5, 7, 17, 50);
  c.query_begin = pick(0, 0, 3);
  c.q_len = c.query_begin + c.num_tokens + pick(0, 0, 2);
  c.kv_len = pick(c.q_len, 1, 5, 64, 127, 128, 129, 200, 300, 515);
  c.kv_begin = c.kv_len > 128 ? pick(0, 0, 128) : 0;
  c.kv_end = c.kv_len > 256 ? pick(c.kv_len, 256) : c.kv_len;
  c.query_dtype = dtype();
  c.kv_dtype = dtype();
  c.out_dtype = pick(DType::f32, dtype());
  c.page_size = pick(0, 1, 5, 16, 16, 48, 256);
  c.token_major = random() % 2 == 0;
  c.softcap = pick(0.0F, 0.0F, 0.0F, 30.0F, 1.5F);
  c.alibi = random() % 4 == 0;
  c.sinks = random() % 3 == 0;
  c.state = random() % 4 == 0;
  c.query_size = pick(1.0F, 1.0F, 8.0F);
  if (c.page_size != 0 && random() % 3 == 0) c.kv_dtype = pick(DType::f8e4m3, DType::f8e5m2, DType::i8);
  if (random() % 8 == 0) c.out_dtype = pick(DType::f8e4m3, DType::f8e5m2);
  if (random() % 4 == 0) c.query_dtype = pick(DType::f8e4m3, DType::f8e5m2);
  c.mask = pick("causal", "causal", "true", "causal & window(20, 0)", "window(3, 150)", "false",
                "own[query] == own[query] & side[key] < 2", "causal & (kv_pos < 10 | side[key] == 1)",
                "kv_pos + q_head + q_head <= q_pos + 13", "kv_pos >= 130 & kv_pos < 140", "causal & ~(kv_pos == 0)");
  return c;
}

struct Kernel {
  std::string_view set;
  const char* name;
  ForwardKernel run;
};

std::ostream& operator<<(std::ostream& out, const Kernel& kernel) { return out << kernel.set << " " << kernel.name; }

std::vector<Kernel> all_kernels() {
  std::vector<Kernel> kernels;
  for (const ForwardKernels& set : all_forward_kernels()) {
    if (set.many_rows == forward_plain) continue;
    kernels.push_back({set.name, "many_rows", set.many_rows});
    kernels.push_back({set.name, "few_rows", set.few_rows});
  }
  return kernels;
}

class ForwardKernelsTest : public testing::TestWithParam<Kernel> {
 protected:
  ForwardKernel kernel() const { return GetParam().run; }
};

INSTANTIATE_TEST_SUITE_P(All, ForwardKernelsTest, testing::ValuesIn(all_kernels()),
                         [](const auto& info) { return std::string(info.param.set) + "_" + info.param.name; });
// On a CPU without vectors that we know, the plain definition is the kernel.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ForwardKernelsTest);

TEST_P(ForwardKernelsTest, random_tasks_equal_plain) {
  for (uint32_t seed = 1; seed <= 250; ++seed) {
    expect_equal_to_plain(Scene(random_config(seed)), kernel());
    if (HasFatalFailure()) return;
  }
}

TEST_P(ForwardKernelsTest, bits_of_a_token_do_not_depend_on_the_others) {
  for (uint32_t seed = 1; seed <= 150; ++seed) {
    const Scene scene(random_config(seed));
    const Config& config = scene.config();
    const Scene::Result together = scene.run(kernel());
    const size_t rows = config.group_size;
    for (int32_t token = 0; token < config.num_tokens; token += 3) {
      const Scene::Result alone = scene.run(kernel(), scene.task_of(config.query_begin + token, 1));
      expect_same_bits(alone.out.data(), &together.out[token * rows * config.head_dim_v], alone.out.size(), config);
      expect_same_bits(alone.lse.data(), &together.lse[token * rows], alone.lse.size(), config);
      if (HasFatalFailure()) return;
    }
  }
}

// The second request sees the same keys from seven positions further back.
TEST_P(ForwardKernelsTest, bits_of_a_token_do_not_depend_on_other_requests_that_share_the_keys) {
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    const Scene scene(random_config(seed));
    const Config& config = scene.config();
    const Scene::Result alone = scene.run(kernel());
    ForwardTask task = scene.task();
    std::vector<TaskToken> tokens(task.tokens.begin(), task.tokens.end());
    mask::ProgramInput other = *tokens.front().mask_input;
    other.request += 3;
    other.kv_len -= 7;
    for (size_t t = tokens.size(); t-- > 0;) {  // before and behind the first request's tokens
      const bool before = t % 2 == 0;
      TaskToken token = tokens[t];
      token.mask_input = &other;
      tokens.insert(before ? tokens.begin() : tokens.end(), token);
    }
    const auto first = static_cast<size_t>(config.num_tokens + 1) / 2;
    std::vector<mask::KeySegment> segments;
    for (int32_t begin = config.kv_begin / kTileKv * kTileKv; begin < config.kv_end; begin += kTileKv) {
      segments.push_back({begin, std::min(begin + kTileKv, config.kv_end), TileClass::partial});
    }
    task.tokens = tokens;
    task.segments = segments;
    if (config.page_size != 0) continue;  // pages that no segment of the scene touches are wild
    const Scene::Result together = scene.run(kernel(), task);
    const size_t row = first * config.group_size;
    expect_same_bits(alone.out.data(), &together.out[row * config.head_dim_v], alone.out.size(), config);
    expect_same_bits(alone.lse.data(), &together.lse[row], alone.lse.size(), config);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ForwardKernelsTest, hidden_nan_and_infinity_do_not_reach_a_row) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const char* mask : {"causal", "causal & window(40, 0)", "kv_pos + q_head <= q_pos + 8"}) {
      Config config;
      config.kv_dtype = dtype;
      config.mask = mask;
      config.num_tokens = config.q_len = 30;
      config.kv_len = config.kv_end = 200;
      Scene scene(config);
      const Scene::Result before = scene.run(kernel());
      for (const float poison : {kNan, kInfinity}) {
        scene.set(true, 190, 5, poison);
        scene.set(false, 190, 3, poison);
        const Scene::Result after = scene.run(kernel());
        // Token t sits at 170 + t; the per-head mask shows head h of it keys up to 170 + t - h.
        const size_t rows = 17 * config.group_size;
        expect_same_bits(after.out.data(), before.out.data(), rows * config.head_dim_v, config);
        expect_same_bits(after.lse.data(), before.lse.data(), rows, config);
        expect_equal_to_plain(scene, kernel());
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(ForwardKernelsTest, visible_nan_reaches_the_row) {
  for (const int32_t position : {0, 100, 199}) {
    Config config;
    config.mask = "true";
    config.kv_len = config.kv_end = 200;
    for (const uint32_t pattern : {0x7FC00000U, 0xFFFFFFFFU, 0x7F800001U}) {
      Scene of_key(config);
      of_key.set(false, position, 63, std::bit_cast<float>(pattern));
      const Scene::Result key_result = of_key.run(kernel());
      EXPECT_THAT(key_result.out, testing::Each(testing::IsNan()));
      EXPECT_THAT(key_result.lse, testing::Each(testing::IsNan()));

      Scene of_value(config);
      of_value.set(true, position, 7, std::bit_cast<float>(pattern));
      const Scene::Result value_result = of_value.run(kernel());
      for (size_t i = 0; i < value_result.out.size(); ++i) {
        EXPECT_EQ(std::isnan(value_result.out[i]), i % config.head_dim_v == 7);
      }
      EXPECT_THAT(value_result.lse, testing::Each(testing::Not(testing::IsNan())));
    }
  }
}

TEST_P(ForwardKernelsTest, nan_in_a_query_stays_in_its_row) {
  Config config;
  Scene scene(config);
  const Scene::Result before = scene.run(kernel());
  scene.set_query(1, 2, 60, kNan);
  const Scene::Result after = scene.run(kernel());
  const size_t row = 1 * config.group_size + 2;
  for (size_t r = 0; r < after.lse.size(); ++r) {
    const float* out = &after.out[r * config.head_dim_v];
    if (r == row) {
      EXPECT_TRUE(std::isnan(after.lse[r]));
      EXPECT_TRUE(std::all_of(out, out + config.head_dim_v, [](float x) { return std::isnan(x); }));
    } else {
      expect_same_bits(out, &before.out[r * config.head_dim_v], config.head_dim_v, config);
      expect_same_bits(&after.lse[r], &before.lse[r], 1, config);
    }
  }
}

// Pages 3 GiB apart, of which only the used tokens are ever touched.
TEST_P(ForwardKernelsTest, offsets_are_64_bit) {
  constexpr int64_t kPageStride = int64_t{3} << 30;
  constexpr int32_t kDim = 8;
  void* memory =
      mmap(nullptr, 2 * kPageStride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* cache = static_cast<std::byte*>(memory);
  const int32_t pages[] = {0, 1};
  for (int64_t page : pages) {  // token 0 of each page: key 0, value page + 1
    for (int32_t d = 0; d < kDim; ++d) {
      store_f32(cache + page * kPageStride + (kDim + d) * 4, DType::f32, static_cast<float>(page + 1));
    }
  }
  const float query[kDim] = {1};
  float out[kDim];
  mask::ProgramInput input;
  input.q_len = 1;
  input.kv_len = 2;
  const mask::KeySegment segment{0, 2, TileClass::full};
  ForwardTask task;
  task.head_dim = task.head_dim_v = kDim;
  task.group_size = 1;
  TaskToken token;
  token.query = reinterpret_cast<const std::byte*>(query);
  token.mask_input = &input;
  token.out = reinterpret_cast<std::byte*>(out);
  task.tokens = {&token, 1};
  task.kv.key = cache;
  task.kv.value = cache + kDim * 4;
  task.kv.pages = pages;
  task.kv.page_size = 1;
  task.kv.key_page_stride = task.kv.value_page_stride = kPageStride;
  task.segments = {&segment, 1};
  kernel()(task);
  EXPECT_THAT(out, testing::Each(1.5F));
  munmap(memory, 2 * kPageStride);
}

TEST_P(ForwardKernelsTest, row_without_keys_is_zero_with_minus_infinity_or_the_sink) {
  Config config;
  config.num_tokens = config.q_len = 20;
  config.kv_len = config.kv_end = 10;  // the first ten tokens lie before the first key
  for (const bool sinks : {false, true}) {
    config.sinks = sinks;
    const Scene scene(config);
    const Scene::Result result = scene.run(kernel());
    for (int32_t row = 0; row < 10 * config.group_size; ++row) {
      EXPECT_EQ(result.lse[row], sinks ? scene.task().sinks[row % config.group_size] : -kInfinity);
      for (int32_t d = 0; d < config.head_dim_v; ++d) EXPECT_EQ(result.out[row * config.head_dim_v + d], 0);
    }
    EXPECT_TRUE(std::isfinite(result.lse[10 * config.group_size]));
  }
}

TEST_P(ForwardKernelsTest, output_is_rounded_to_nearest_even_and_overflows_to_infinity) {
  Config config;
  config.mask = "true";
  Scene exact(config);
  for (int32_t position = 0; position < config.kv_len; ++position) exact.set(true, position, 1, -70000);
  const std::vector<float> unrounded = exact.run(kernel()).out;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    config.out_dtype = dtype;
    Scene scene(config);
    for (int32_t position = 0; position < config.kv_len; ++position) scene.set(true, position, 1, -70000);
    const std::vector<float> rounded = scene.run(kernel()).out;
    for (size_t i = 0; i < rounded.size(); ++i) {
      std::byte bits[2];
      store_f32(bits, dtype, unrounded[i]);
      EXPECT_EQ(rounded[i], load_f32(bits, dtype));
    }
    EXPECT_EQ(std::isinf(rounded[1]), dtype == DType::f16);
  }
}

TEST_P(ForwardKernelsTest, softcap_keeps_small_scores_and_saturates) {
  Config config;
  config.mask = "true";
  for (const float softcap : {0.5F, 50.0F, 1000.0F}) {
    for (const float size : {1e-3F, 1.0F, 100.0F}) {
      config.softcap = softcap;
      config.query_size = size;
      const Scene scene(config);
      const Scene::Result expected = scene.run(forward_plain);
      const Scene::Result actual = scene.run(kernel());
      const float tolerance = 2e-6F + 1e-6F * std::min(softcap, 4 * size);
      for (size_t i = 0; i < expected.lse.size(); ++i) EXPECT_NEAR(actual.lse[i], expected.lse[i], tolerance);
    }
  }
}

TEST(forward_kernels, names_are_listed_best_first_and_an_unknown_one_is_refused) {
  EXPECT_EQ(instruction_set_names().back(), "plain");
  for (const std::string_view name : instruction_set_names()) EXPECT_EQ(find_forward_kernels(name).name, name);
  try {
    find_forward_kernels("mmx");
    FAIL() << "a name that does not exist was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    EXPECT_EQ(error.value(), "mmx");
    for (const std::string_view name : instruction_set_names()) {
      EXPECT_THAT(error.allowed(), testing::HasSubstr(std::string(name)));
    }
  }
}

}  // namespace
}  // namespace qkv::cpu
