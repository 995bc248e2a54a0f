// A request's bits do not depend on its neighbours, on the number of threads, or on whose pool they belong to.
#include <atomic>
#include <cstring>
#include <thread>

#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::case_of;

std::vector<std::byte> bits_of(const tools::Case& c) {
  tools::CaseData data(c);
  const Attention attention(c.layer);
  const Plan plan = attention.plan(data.batch());
  attention.update_cache(data.key.view(), data.value.view(), data.cache(), plan);
  const int64_t rows = data.num_tokens;
  const int32_t heads = c.layer.num_q_heads;
  tools::OwnedTensor out(c.layer.out_dtype(), {rows, heads, c.layer.value_dim()});
  tools::OwnedTensor lse(DType::f32, {heads, rows});
  attention.forward(data.query.view(), data.cache(), plan, out.view(), lse.view());
  const auto* out_bytes = static_cast<const std::byte*>(out.buffer().data());
  std::vector<std::byte> bits(out_bytes, out_bytes + out.view().num_elements() * size_bytes(c.layer.out_dtype()));
  const auto* lse_bytes = static_cast<const std::byte*>(lse.buffer().data());
  bits.insert(bits.end(), lse_bytes, lse_bytes + lse.view().num_elements() * 4);
  return bits;
}

tools::Case mixed_batch() {
  auto c = case_of(8, 2, 64, {1, 300, 1, 17, 5}, {5000, 300, 33, 900, 4100});
  c.layer.softcap = 30;
  c.layer.sinks.assign(8, 0.5F);
  return c;
}

TEST(invariance, threads_do_not_change_bits) {
  const tools::Case c = mixed_batch();
  set_num_threads(1);
  const auto one = bits_of(c);
  for (const int32_t threads : {2, 3, 8}) {
    set_num_threads(threads);
    EXPECT_EQ(bits_of(c), one) << threads << " threads";
  }
  set_num_threads(0);
}

// Every index once, over four threads in an order of their own.
void run_on_std_threads(int64_t n, const std::function<void(int64_t)>& body) {
  std::atomic<int64_t> next{n};
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int64_t i = --next; i >= 0; i = --next) body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(invariance, a_host_thread_pool_gives_the_same_bits) {
  const tools::Case c = mixed_batch();
  const auto own = bits_of(c);
  set_parallel_for(run_on_std_threads);
  const auto hosted = bits_of(c);
  set_parallel_for({});
  EXPECT_EQ(hosted, own);
}

TEST(invariance, several_threads_share_one_plan_and_layer) {
  const tools::Case c = mixed_batch();
  tools::CaseData data(c);
  const Attention attention(c.layer);
  const Plan plan = attention.plan(data.batch());
  attention.update_cache(data.key.view(), data.value.view(), data.cache(), plan);
  set_parallel_for([](int64_t n, const std::function<void(int64_t)>& body) {
    for (int64_t i = 0; i < n; ++i) body(i);
  });
  const auto elements = static_cast<size_t>(data.num_tokens) * 8 * 64;
  std::vector<std::vector<float>> results(3, std::vector<float>(elements));
  std::vector<std::thread> threads;
  for (auto& out : results) {
    threads.emplace_back([&] {
      attention.forward(data.query.view(), data.cache(), plan, testing::view(out, {data.num_tokens, 8, 64}));
    });
  }
  for (std::thread& thread : threads) thread.join();
  set_parallel_for({});
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(invariance, an_exception_in_a_host_pool_thread_reaches_the_caller) {
  set_parallel_for([](int64_t, const std::function<void(int64_t)>&) { throw std::runtime_error("pool is gone"); });
  EXPECT_THROW(bits_of(mixed_batch()), std::runtime_error);
  set_parallel_for({});
}

// casebook 77: alone; with 31 others; first, in the middle and last.
TEST(invariance, a_decode_row_keeps_its_bits_at_any_place_of_any_batch) {
  const LayerSpec layer = [] {
    LayerSpec spec = testing::layer_of(8, 2, 32);
    spec.cache = CacheSpec{16};
    return spec;
  }();
  const int32_t num_requests = 32;
  const int32_t width = 500;
  std::vector<int32_t> lengths(num_requests);
  for (int32_t r = 0; r < num_requests; ++r) lengths[r] = 1 + (r * 2579) % 8000;
  const int32_t num_pages = width + 1;
  std::vector<float> pages(static_cast<size_t>(num_pages) * 2 * 16 * 64);
  tools::Draw draw(77, 0);
  for (float& x : pages) x = draw.normal();
  const KvCache cache = KvCache::from_interleaved(testing::view(pages, {num_pages, 2, 16, 64}), 32);
  std::vector<float> special_query(8 * 32);
  for (float& x : special_query) x = draw.normal();
  const Attention attention(layer);

  // The special request (5000 keys) at `place` among `others` further ones, all reading the same pages.
  const auto run = [&](int32_t place, int32_t others) {
    const int32_t count = others + 1;
    std::vector<int32_t> starts(count + 1);
    std::vector<int32_t> seq_lens(lengths.begin(), lengths.begin() + count);
    seq_lens[place] = 5000;
    std::vector<int32_t> table;
    std::vector<float> query(static_cast<size_t>(count) * 8 * 32, 0.25F);
    std::copy(special_query.begin(), special_query.end(), query.begin() + static_cast<int64_t>(place) * 8 * 32);
    for (int32_t r = 0; r < count; ++r) {
      starts[r + 1] = r + 1;
      for (int32_t i = 0; i < width; ++i) table.push_back((i * 7) % num_pages);
    }
    Batch batch;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(seq_lens);
    batch.block_table = Tensor::contiguous(table.data(), DType::i32, {count, width});
    std::vector<float> out(query.size());
    std::vector<float> lse(static_cast<size_t>(count) * 8);
    attention.forward(testing::view(query, {count, 8, 32}), cache, attention.plan(batch),
                      testing::view(out, {count, 8, 32}), testing::view(lse, {8, count}));
    std::vector<float> result(out.begin() + static_cast<int64_t>(place) * 8 * 32,
                              out.begin() + static_cast<int64_t>(place + 1) * 8 * 32);
    for (int32_t h = 0; h < 8; ++h) result.push_back(lse[static_cast<size_t>(h) * count + place]);
    return result;
  };
  const auto alone = run(0, 0);
  for (const int32_t place : {0, 15, 31}) EXPECT_EQ(run(place, 31), alone) << "at place " << place;
}

// casebook 82, as far as it is promised: chunks of at least one item's rows give the bits of the whole prompt.
TEST(invariance, a_prompt_in_large_chunks_has_the_bits_of_one_shot) {
  const LayerSpec layer = [] {
    LayerSpec spec = testing::layer_of(4, 2, 32);
    spec.mask = mask::causal();
    return spec;
  }();
  const int32_t total = 1000;
  std::vector<float> tokens(static_cast<size_t>(total) * 2 * 32);
  std::vector<float> query(static_cast<size_t>(total) * 4 * 32);
  tools::Draw draw(82, 0);
  for (float& x : tokens) x = draw.normal();
  for (float& x : query) x = draw.normal();
  const Attention attention(layer);
  std::vector<float> whole(query.size());
  std::vector<float> chunked(query.size());
  const auto run = [&](int32_t begin, int32_t end, std::vector<float>& out) {
    const std::vector<int32_t> starts = {0, end - begin};
    const std::vector<int32_t> lengths = {end};
    Batch batch;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(lengths);
    const Tensor keys = testing::view(tokens, {total, 2, 32});
    attention.forward(testing::view(query, {total, 4, 32}).slice(0, begin, end), keys, keys, attention.plan(batch),
                      testing::view(out, {total, 4, 32}).slice(0, begin, end));
  };
  run(0, total, whole);
  run(0, 333, chunked);
  run(333, 666, chunked);
  run(666, total, chunked);
  EXPECT_EQ(chunked, whole);
}

}  // namespace
}  // namespace qkv
