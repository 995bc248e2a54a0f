// Both kernels of every instruction set of this CPU against the plain definition, over random tasks and at the edges.
// Caches hold NaN in all memory that a task does not own; page table entries outside the segments are wild.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/float16.hpp"
#include "cpu/kernels.hpp"
#include "qkv/status.hpp"

namespace qkv::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kGuard = 12345.0F;

struct Config {
  int32_t head_dim = 64;
  int32_t head_dim_v = 64;
  int32_t group_size = 4;
  int32_t num_tokens = 3;
  int32_t query_begin = 0;
  int32_t q_len = 3;
  int32_t kv_len = 300;
  int32_t kv_begin = 0, kv_end = 300;  // the split that the task covers
  DType query_dtype = DType::f32, kv_dtype = DType::f32, out_dtype = DType::f32;
  int32_t page_size = 0;  // 0 = dense
  bool token_major = false;
  float softcap = 0;
  bool alibi = false;
  bool sinks = false;
  bool state = false;
  std::string mask = "causal";
  float query_size = 1;
  uint32_t seed = 1;
};

std::ostream& operator<<(std::ostream& out, const Config& c) {
  return out << "seed " << c.seed << " dims " << c.head_dim << "/" << c.head_dim_v << " group " << c.group_size
             << " tokens " << c.query_begin << "+" << c.num_tokens << "/" << c.q_len << " keys [" << c.kv_begin << ","
             << c.kv_end << ")/" << c.kv_len << " dtypes " << to_string(c.query_dtype) << "," << to_string(c.kv_dtype)
             << "," << to_string(c.out_dtype) << " page " << c.page_size << (c.token_major ? " token-major" : "")
             << " softcap " << c.softcap << (c.alibi ? " alibi" : "") << (c.sinks ? " sinks" : "")
             << (c.state ? " state" : "") << " size " << c.query_size << " mask " << c.mask;
}

// A task and all memory that it points to.
class Scene {
 public:
  explicit Scene(const Config& config) : config_(config), random_(config.seed) {
    make_query();
    make_cache();
    make_mask();
    slopes_.resize(config.group_size);
    sinks_.resize(config.group_size);
    for (int32_t h = 0; h < config.group_size; ++h) {
      slopes_[h] = std::exp2(-static_cast<float>(h % 8 + 1));
      sinks_[h] = h % 5 == 4 ? -kInfinity : normal() * 2;
    }
  }

  // Element d of the key (or value) at a position.
  void set(bool of_value, int32_t position, int32_t d, float value) {
    store_f32(cache_.data() + offset(of_value, position) + d * element_bytes(), config_.kv_dtype, value);
  }

  ForwardTask task() const { return task_of(config_.query_begin, config_.num_tokens); }

  // A task of some of the tokens, with segments of its own.
  ForwardTask task_of(int32_t query_begin, int32_t num_tokens) const {
    ForwardTask task;
    task.head_dim = config_.head_dim;
    task.head_dim_v = config_.head_dim_v;
    task.group_size = config_.group_size;
    task.num_tokens = num_tokens;
    task.query_dtype = config_.query_dtype;
    task.query_head_stride = (config_.head_dim + 3) * size_bytes(config_.query_dtype);
    task.query_token_stride = config_.group_size * task.query_head_stride;
    task.query = query_.data() + (query_begin - config_.query_begin) * task.query_token_stride;
    task.kv = kv_;
    segments_.clear();
    mask::append_segments(program_, input_,
                          {query_begin, query_begin + num_tokens, config_.kv_begin, config_.kv_end, kFirstHead,
                           kFirstHead + config_.group_size},
                          kTileKv, segments_);
    task.segments = segments_;
    task.scale = 1 / std::sqrt(static_cast<float>(config_.head_dim));
    task.softcap = config_.softcap;
    if (config_.alibi) task.alibi_slopes = slopes_.data();
    if (config_.sinks) task.sinks = sinks_.data();
    task.mask = &program_;
    task.mask_input = &input_;
    task.query_begin = query_begin;
    task.first_head = kFirstHead;
    return task;
  }

  struct Result {
    std::vector<float> out;  // [num_tokens, group_size, head_dim_v]
    std::vector<float> lse;  // [num_tokens, group_size]
  };

  Result run(ForwardKernel kernel) const { return run(kernel, task()); }

  Result run(ForwardKernel kernel, ForwardTask task) const {
    const int32_t rows = task.num_rows();
    const int32_t dims = config_.head_dim_v;
    if (config_.state) {
      Result result{std::vector<float>(rows * dims + 1, kGuard), std::vector<float>(rows + 1, kGuard)};
      task.state_out = result.out.data();
      task.state_lse = result.lse.data();
      kernel(task);
      EXPECT_EQ(result.out.back(), kGuard);
      EXPECT_EQ(result.lse.back(), kGuard);
      result.out.pop_back();
      result.lse.pop_back();
      return result;
    }
    // One element between rows, which must keep its value.
    const int32_t bytes = size_bytes(config_.out_dtype);
    std::vector<std::byte> out(int64_t{rows} * (dims + 1) * bytes, std::byte{0x55});
    Result result{{}, std::vector<float>(rows, kGuard)};
    task.out_dtype = config_.out_dtype;
    task.out = out.data();
    task.out_head_stride = (dims + 1) * bytes;
    task.out_token_stride = config_.group_size * task.out_head_stride;
    task.lse = result.lse.data();
    task.lse_head_stride = 1;
    task.lse_token_stride = config_.group_size;
    kernel(task);
    for (int32_t row = 0; row < rows; ++row) {
      const std::byte* at = out.data() + int64_t{row} * (dims + 1) * bytes;
      for (int32_t d = 0; d < dims; ++d) result.out.push_back(load_f32(at + d * bytes, config_.out_dtype));
      EXPECT_EQ(at[dims * bytes], std::byte{0x55});
    }
    return result;
  }

  const Config& config() const { return config_; }

 private:
  static constexpr int32_t kFirstHead = 8;

  float normal() { return std::normal_distribution<float>()(random_); }
  int64_t element_bytes() const { return size_bytes(config_.kv_dtype); }

  void make_query() {
    const int64_t stride = config_.head_dim + 3;
    const int32_t bytes = size_bytes(config_.query_dtype);
    query_.resize(config_.num_tokens * config_.group_size * stride * bytes);
    for (int64_t i = 0; i < static_cast<int64_t>(query_.size()) / bytes; ++i) {
      store_f32(query_.data() + i * bytes, config_.query_dtype,
                i % stride < config_.head_dim ? normal() * config_.query_size : kNan);
    }
  }

  // Two KV heads, of which the second is the task's; key and value of a token side by side.
  void make_cache() {
    const int64_t row = config_.head_dim + config_.head_dim_v + 1;
    const int32_t page = config_.page_size != 0 ? config_.page_size : config_.kv_len + 1;
    const int32_t num_pages = (config_.kv_len + page - 1) / page;
    const int64_t token_stride = config_.token_major ? 2 * row : row;
    const int64_t head_stride = config_.token_major ? row : page * row;
    kv_.dtype = config_.kv_dtype;
    kv_.key_token_stride = kv_.value_token_stride = token_stride * element_bytes();
    kv_.key_page_stride = kv_.value_page_stride = 2 * page * row * element_bytes();
    kv_.page_size = page;
    cache_.resize(kv_.key_page_stride * (num_pages + 1));
    for (size_t i = 0; i < cache_.size(); i += element_bytes()) store_f32(&cache_[i], config_.kv_dtype, kNan);
    kv_.key = cache_.data() + head_stride * element_bytes();
    kv_.value = kv_.key + config_.head_dim * element_bytes();
    for (int32_t p = 0; p < num_pages; ++p) pages_.push_back(p);
    if (config_.page_size != 0) std::shuffle(pages_.begin(), pages_.end(), random_);
    for (int32_t position = 0; position < config_.kv_len; ++position) {
      for (int32_t d = 0; d < config_.head_dim; ++d) set(false, position, d, normal());
      for (int32_t d = 0; d < config_.head_dim_v; ++d) set(true, position, d, normal());
    }
  }

  void make_mask() {
    program_ = mask::compile(parse_mask(config_.mask));
    input_.request = 2;
    input_.q_len = config_.q_len;
    input_.kv_len = config_.kv_len;
    for (const OperandDeclaration& operand : program_.operands) {
      const int32_t count = operand.scope == OperandScope::key     ? config_.kv_len
                            : operand.scope == OperandScope::query ? config_.q_len
                                                                   : 1;
      std::vector<int32_t>& values = operands_.emplace_back(count);
      for (int32_t& value : values) value = static_cast<int32_t>(random_() % 3);
    }
    for (const std::vector<int32_t>& values : operands_) input_.operand.push_back(values.data());

    // Pages that no segment touches are unknown.
    if (config_.page_size == 0) return;
    kv_.pages = pages_.data();
    const ForwardTask whole = task();
    std::vector<bool> touched(pages_.size());
    for (const mask::KeySegment& segment : whole.segments) {
      for (int32_t k = segment.begin; k < segment.end; ++k) touched[k / config_.page_size] = true;
    }
    for (size_t p = 0; p < pages_.size(); ++p) {
      if (!touched[p]) pages_[p] = 1 << 30;
    }
  }

  int64_t offset(bool of_value, int32_t position) const {
    const std::byte* at = (of_value ? kv_.value : kv_.key) + pages_[position / kv_.page_size] * kv_.key_page_stride +
                          position % kv_.page_size * kv_.key_token_stride;
    return at - cache_.data();
  }

  Config config_;
  std::mt19937 random_;
  std::vector<std::byte> query_, cache_;
  std::vector<int32_t> pages_;
  KeyValueSource kv_;
  mask::Program program_;
  mask::ProgramInput input_;
  std::vector<std::vector<int32_t>> operands_;
  std::vector<float> slopes_, sinks_;
  mutable std::vector<mask::KeySegment> segments_;
};

// One step of the output's format at the value's size.
float rounding_step(DType dtype, float value) {
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
