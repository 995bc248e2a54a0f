// A forward task with all memory that it points to. Caches hold NaN in all memory that the task does not own, page
// table entries outside the segments are wild, and outputs sit between guards.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "core/float16.hpp"
#include "cpu/kernels.hpp"

namespace qkv::cpu::forward_test {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kGuard = 12345.0F;
inline constexpr float kOutScale = 0.03125F;  // of outputs of 8-bit floats

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

// A one-line reproducer.
inline std::ostream& operator<<(std::ostream& out, const Config& c) {
  return out << "seed " << c.seed << " dims " << c.head_dim << "/" << c.head_dim_v << " group " << c.group_size
             << " tokens " << c.query_begin << "+" << c.num_tokens << "/" << c.q_len << " keys [" << c.kv_begin << ","
             << c.kv_end << ")/" << c.kv_len << " dtypes " << to_string(c.query_dtype) << "," << to_string(c.kv_dtype)
             << "," << to_string(c.out_dtype) << " page " << c.page_size << (c.token_major ? " token-major" : "")
             << " softcap " << c.softcap << (c.alibi ? " alibi" : "") << (c.sinks ? " sinks" : "")
             << (c.state ? " state" : "") << " size " << c.query_size << " mask " << c.mask;
}

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

  // Element d of the query of a token, counted from query_begin, and head.
  void set_query(int32_t token, int32_t head, int32_t d, float value) {
    const int64_t row = int64_t{token} * config_.group_size + head;
    const int32_t bytes = size_bytes(config_.query_dtype);
    store_f32(query_.data() + (row * (config_.head_dim + 3) + d) * bytes, config_.query_dtype, value);
  }

  // Element d of the key (or value) at a position.
  void set(bool of_value, int32_t position, int32_t d, float value) {
    store_f32(cache_.data() + offset(of_value, position) + d * element_bytes(), config_.kv_dtype, value * kv_size());
  }

  ForwardTask task() const { return task_of(config_.query_begin, config_.num_tokens); }

  // A task of some of the tokens, with segments of its own. The scene holds what it points to, until the next one.
  ForwardTask task_of(int32_t query_begin, int32_t num_tokens) const {
    ForwardTask task;
    task.head_dim = config_.head_dim;
    task.head_dim_v = config_.head_dim_v;
    task.group_size = config_.group_size;
    task.query_dtype = config_.query_dtype;
    task.query_head_stride = (config_.head_dim + 3) * size_bytes(config_.query_dtype);
    tokens_.clear();
    for (int32_t query = query_begin; query < query_begin + num_tokens; ++query) {
      TaskToken& token = tokens_.emplace_back();
      token.query = query_.data() + (query - config_.query_begin) * config_.group_size * task.query_head_stride;
      token.mask_input = &input_;
      token.query_index = query;
      if (is_float8(config_.query_dtype)) token.query_scale = 0.375F + 0.125F * static_cast<float>(query % 3);
      if (config_.alibi) token.alibi_slopes = slopes_.data();
    }
    task.tokens = tokens_;
    task.kv = kv_;
    segments_.clear();
    mask::append_segments(program_, input_,
                          {query_begin, query_begin + num_tokens, config_.kv_begin, config_.kv_end, kFirstHead,
                           kFirstHead + config_.group_size},
                          kTileKv, segments_);
    task.segments = segments_;
    task.scale = 1 / std::sqrt(static_cast<float>(config_.head_dim));
    task.softcap = config_.softcap;
    if (config_.sinks) task.sinks = sinks_.data();
    task.mask = &program_;
    task.first_head = kFirstHead;
    return task;
  }

  struct Result {
    std::vector<float> out;  // [num_tokens, group_size, head_dim_v]
    std::vector<float> lse;  // [num_tokens, group_size]
  };

  Result run(ForwardKernel kernel) const { return run(kernel, task()); }

  // Runs a task of this scene's tokens.
  Result run(ForwardKernel kernel, ForwardTask task) const {
    const int32_t rows = task.num_rows();
    const int32_t dims = config_.head_dim_v;
    const int32_t group = config_.group_size;
    std::vector<TaskToken> tokens(task.tokens.begin(), task.tokens.end());
    task.tokens = tokens;
    if (config_.state) {
      Result result{std::vector<float>(rows * dims + 1, kGuard), std::vector<float>(rows + 1, kGuard)};
      for (size_t t = 0; t < tokens.size(); ++t) {
        tokens[t].state_out = result.out.data() + t * group * dims;
        tokens[t].state_lse = result.lse.data() + t * group;
      }
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
    OutputScale out_scale;
    out_scale.given = is_float8(config_.out_dtype) ? kOutScale : 1;
    task.out_head_stride = (dims + 1) * bytes;
    task.lse_head_stride = 1;
    for (size_t t = 0; t < tokens.size(); ++t) {
      tokens[t].out = out.data() + t * group * task.out_head_stride;
      tokens[t].out_scale = out_scale;
      tokens[t].lse = result.lse.data() + t * group;
    }
    kernel(task);
    for (int32_t row = 0; row < rows; ++row) {
      const std::byte* at = out.data() + int64_t{row} * (dims + 1) * bytes;
      for (int32_t d = 0; d < dims; ++d) {
        result.out.push_back(load_f32(at + d * bytes, config_.out_dtype) * out_scale.given);
      }
      EXPECT_EQ(at[dims * bytes], std::byte{0x55});
    }
    return result;
  }

  const Config& config() const { return config_; }

 private:
  static constexpr int32_t kFirstHead = 8;

  float normal() { return std::normal_distribution<float>()(random_); }
  int64_t element_bytes() const { return size_bytes(config_.kv_dtype); }
  // Of keys and values as they are stored: integers need some room.
  float kv_size() const { return config_.kv_dtype == DType::i8 ? 32 : 1; }

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
    if (is_8bit(config_.kv_dtype)) make_scales(num_pages);
  }

  // One a token, none of them 1, and NaN where there is no token; those of pages lie in the order of their tokens.
  void make_scales(int32_t num_pages) {
    for (std::vector<float>* scales : {&key_scales_, &value_scales_}) {
      scales->assign(num_pages * kv_.page_size, kNan);
      for (int32_t position = 0; position < config_.kv_len; ++position) {
        const float scale = (0.25F + 0.01F * static_cast<float>(random_() % 64)) / kv_size();
        (*scales)[pages_[position / kv_.page_size] * kv_.page_size + position % kv_.page_size] = scale;
      }
    }
    kv_.key_scale = {key_scales_.data(), kv_.page_size, 1};
    kv_.value_scale = {value_scales_.data(), kv_.page_size, 1};
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
  std::vector<float> slopes_, sinks_, key_scales_, value_scales_;
  mutable std::vector<mask::KeySegment> segments_;
  mutable std::vector<TaskToken> tokens_;
};

}  // namespace qkv::cpu::forward_test
