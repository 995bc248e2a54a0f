// Casebook, kind K: a prompt's context taken in chunks that fit a workspace, the states merged, against one pass.
#include <cmath>
#include <limits>
#include <random>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::layer_of;
using testing::view;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Requests with cached context and new tokens; keys and values of a request lie one after another.
struct Prompt {
  std::vector<int32_t> context;  // cached keys of each request
  std::vector<int32_t> q_lens;   // new tokens of each
  int32_t heads, head_dim, head_dim_v;
};

struct Chunk {
  std::vector<int32_t> begin, end;  // keys of each request
};

class ChunkedContext : public ::testing::Test {
 protected:
  void make(const Prompt& prompt) {
    prompt_ = prompt;
    num_requests_ = static_cast<int32_t>(prompt.context.size());
    for (int32_t r = 0; r < num_requests_; ++r) {
      key_start_.push_back(key_start_.back() + prompt.context[r] + prompt.q_lens[r]);
      query_start_.push_back(query_start_.back() + prompt.q_lens[r]);
    }
    query_ = random_values(query_start_.back() * prompt.heads * int64_t{prompt.head_dim});
    key_ = random_values(key_start_.back() * prompt.heads * int64_t{prompt.head_dim});
    value_ = random_values(key_start_.back() * prompt.heads * int64_t{prompt.head_dim_v});
  }

  struct Result {
    std::vector<float> out, lse;
  };

  // Attention of all queries to one chunk of each request's keys; what is not written stays NaN.
  Result run(const Chunk& chunk, const Mask& mask) const {
    LayerSpec layer = layer_of(prompt_.heads, prompt_.heads, prompt_.head_dim);
    layer.head_dim_v = prompt_.head_dim_v;
    layer.mask = mask;
    std::vector<int32_t> lengths;
    std::vector<float> key, value;
    for (int32_t r = 0; r < num_requests_; ++r) {
      lengths.push_back(chunk.end[r] - chunk.begin[r]);
      append(key, key_, r, chunk, prompt_.head_dim);
      append(value, value_, r, chunk, prompt_.head_dim_v);
    }
    Batch batch;
    batch.query_start_loc = view(query_start_);
    batch.seq_lens = view(lengths);
    const Attention attention(layer);
    Result result = empty_result();
    const int64_t num_keys = static_cast<int64_t>(key.size()) / (prompt_.heads * prompt_.head_dim);
    attention.forward(view(query_, {query_start_.back(), prompt_.heads, prompt_.head_dim}),
                      view(key, {num_keys, prompt_.heads, prompt_.head_dim}),
                      view(value, {num_keys, prompt_.heads, prompt_.head_dim_v}), attention.plan(batch),
                      out_view(result), lse_view(result));
    return result;
  }

  Result one_pass() const {
    Chunk all;
    for (int32_t r = 0; r < num_requests_; ++r) {
      all.begin.push_back(0);
      all.end.push_back(prompt_.context[r] + prompt_.q_lens[r]);
    }
    return run(all, mask::causal());
  }

  // Rounds of at most `workspace` tokens a request, then the new tokens.
  Result in_chunks(int32_t workspace) const {
    std::vector<Result> results;
    Chunk news;
    for (int32_t r = 0; r < num_requests_; ++r) {
      news.begin.push_back(prompt_.context[r]);
      news.end.push_back(prompt_.context[r] + prompt_.q_lens[r]);
    }
    const int32_t longest = *std::max_element(prompt_.context.begin(), prompt_.context.end());
    for (int32_t begin = 0; begin < longest; begin += workspace) {
      Chunk chunk;
      for (const int32_t context : prompt_.context) {
        chunk.begin.push_back(std::min(begin, context));
        chunk.end.push_back(std::min(begin + workspace, context));
      }
      results.push_back(run(chunk, mask::everything()));
    }
    results.push_back(run(news, mask::causal()));
    std::vector<State> states;
    for (const Result& result : results) states.push_back({out_view(result), lse_view(result)});
    Result merged = empty_result();
    merge_states(states, out_view(merged), lse_view(merged));
    return merged;
  }

  static void expect_equal(const Result& merged, const Result& expected) {
    for (size_t i = 0; i < expected.out.size(); ++i) ASSERT_TRUE(near(merged.out[i], expected.out[i])) << i;
    for (size_t i = 0; i < expected.lse.size(); ++i) ASSERT_TRUE(near(merged.lse[i], expected.lse[i])) << i;
  }

 private:
  static bool near(float a, float b) { return std::abs(a - b) <= 1e-5F * std::max(1.0F, std::abs(b)); }

  static std::vector<float> random_values(int64_t count) {
    std::mt19937 random(static_cast<uint32_t>(count));
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31F;
    return values;
  }

  void append(std::vector<float>& to, const std::vector<float>& from, int32_t request, const Chunk& chunk,
              int32_t dim) const {
    const int64_t row = int64_t{prompt_.heads} * dim;
    const auto begin = from.begin() + (key_start_[request] + chunk.begin[request]) * row;
    to.insert(to.end(), begin, begin + (chunk.end[request] - chunk.begin[request]) * row);
  }

  Result empty_result() const {
    const auto rows = static_cast<size_t>(query_start_.back()) * prompt_.heads;
    return {std::vector<float>(rows * prompt_.head_dim_v, kNan), std::vector<float>(rows, kNan)};
  }
  Tensor out_view(const Result& result) const {
    return view(result.out, {query_start_.back(), prompt_.heads, prompt_.head_dim_v});
  }
  Tensor lse_view(const Result& result) const { return view(result.lse, {prompt_.heads, query_start_.back()}); }

  Prompt prompt_;
  int32_t num_requests_ = 0;
  std::vector<int64_t> key_start_ = {0};
  std::vector<int32_t> query_start_ = {0};
  std::vector<float> query_, key_, value_;
};

TEST_F(ChunkedContext, casebook_097_rounds_in_which_some_requests_have_no_key) {
  make({{0, 128, 2415}, {5, 1, 7}, 16, 192, 128});
  const Result expected = one_pass();
  expect_equal(in_chunks(128), expected);
  expect_equal(in_chunks(1208), expected);  // two rounds
}

TEST_F(ChunkedContext, casebook_100_third_state_of_a_context_of_131072_keys) {
  make({{131072}, {16}, 1, 192, 128});
  expect_equal(in_chunks(65536), one_pass());
}

TEST_F(ChunkedContext, requests_without_new_tokens_or_keys_beside_others) {
  make({{300, 0, 40, 0}, {3, 0, 0, 2}, 2, 64, 32});
  const Result expected = one_pass();
  for (const int32_t workspace : {1000, 64, 17}) expect_equal(in_chunks(workspace), expected);
}

}  // namespace
}  // namespace qkv
