#include "bench/support/workload.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "core/float16.hpp"

namespace qkv::bench {

std::vector<std::byte> random_values(int64_t count, DType dtype) {
  std::minstd_rand engine(1);
  std::normal_distribution<float> normal;
  // A period of draws that shares no factor with head sizes; drawing each value would take longer than the benchmark.
  constexpr int64_t kPeriod = 10007;
  const int64_t element = size_bytes(dtype);
  std::vector<std::byte> bytes(count * element);
  for (int64_t i = 0; i < std::min(count, kPeriod); ++i) store_f32(&bytes[i * element], dtype, normal(engine));
  for (int64_t i = kPeriod; i < count; i += kPeriod) {
    std::memcpy(&bytes[i * element], bytes.data(), std::min(kPeriod, count - i) * element);
  }
  return bytes;
}

Workload::Workload(LayerSpec layer, const std::vector<Lengths>& requests, Layout layout,
                   const std::vector<PrefixGroup>& prefix_groups)
    : layer_(std::move(layer)), layout_(layout) {
  query_start_loc_ = {0};
  int32_t widest = 0;
  const int64_t page_size = layer_.cache ? layer_.cache->page_size : 1;
  for (const Lengths& request : requests) {
    query_start_loc_.push_back(query_start_loc_.back() + request.q_len);
    seq_lens_.push_back(request.kv_len);
    num_keys_ += request.kv_len;
    widest = std::max(widest, static_cast<int32_t>((request.kv_len + page_size - 1) / page_size));
  }
  const auto num_requests = static_cast<int64_t>(requests.size());
  query_ = random_values(num_tokens() * layer_.num_q_heads * layer_.head_dim, layer_.query_dtype);
  out_.resize(num_tokens() * layer_.num_q_heads * layer_.value_dim() * size_bytes(layer_.out_dtype()));

  Batch& batch = batch_;
  batch.query_start_loc =
      Tensor::contiguous(query_start_loc_.data(), DType::i32, {static_cast<int64_t>(query_start_loc_.size())});
  batch.seq_lens = Tensor::contiguous(seq_lens_.data(), DType::i32, {num_requests});
  const int64_t kv_heads = layer_.num_kv_heads;
  const int64_t dim = layer_.head_dim;
  if (layout == Layout::dense) {
    key_ = random_values(num_keys_ * kv_heads * dim, layer_.kv_dtype);
    value_ = random_values(num_keys_ * kv_heads * layer_.value_dim(), layer_.kv_dtype);
  } else {
    const int64_t num_pages = fill_block_table(widest, page_size, prefix_groups);
    const int64_t row = dim + layer_.value_dim();
    key_ = random_values(num_pages * page_size * kv_heads * row, layer_.kv_dtype);
    Tensor pages =
        layout == Layout::head_major
            ? Tensor::contiguous(key_.data(), layer_.kv_dtype, {num_pages, kv_heads, page_size, row})
            : Tensor::contiguous(key_.data(), layer_.kv_dtype, {num_pages, page_size, kv_heads, row}).swap_axes(1, 2);
    cache_ = KvCache::from_interleaved(pages, layer_.head_dim);
    batch.block_table = Tensor::contiguous(block_table_.data(), DType::i32, {num_requests, widest});
    for (int64_t r = 0; r < num_requests; ++r) {
      for (int32_t i = requests[r].kv_len - requests[r].q_len; i < requests[r].kv_len; ++i) {
        slot_mapping_.push_back(block_table_[r * widest + i / page_size] * page_size + i % page_size);
      }
    }
    batch.slot_mapping =
        Tensor::contiguous(slot_mapping_.data(), DType::i64, {static_cast<int64_t>(slot_mapping_.size())});
    value_ = random_values(num_tokens() * kv_heads * std::max<int64_t>(dim, layer_.value_dim()), layer_.query_dtype);
  }
  attention_ = std::make_unique<Attention>(layer_);
  plan(PrefixSharing::automatic);
}

// Pages in random order, as after hours of serving. Returns how many there are.
int64_t Workload::fill_block_table(int64_t width, int64_t page_size, const std::vector<PrefixGroup>& prefix_groups) {
  block_table_.assign(seq_lens_.size() * width, -1);
  int32_t num_pages = 0;
  for (size_t r = 0; r < seq_lens_.size(); ++r) {
    int32_t* own = &block_table_[r * width];
    for (const PrefixGroup& group : prefix_groups) {
      const bool is_member = std::find(group.requests.begin(), group.requests.end(), r) != group.requests.end();
      if (is_member) std::copy_n(&block_table_[group.requests.front() * width], group.num_tokens / page_size, own);
    }
    for (int64_t i = 0; i * page_size < seq_lens_[r]; ++i) {
      if (own[i] < 0) own[i] = num_pages++;
    }
  }
  std::vector<int32_t> order(num_pages);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::minstd_rand(7));
  for (int32_t& page : block_table_) page = page < 0 ? page : order[page];
  return num_pages;
}

void Workload::plan(PrefixSharing sharing, bool keeps_bits, const std::vector<PrefixGroup>& given_groups) {
  batch_.prefix_groups = given_groups;
  batch_.prefix_sharing = sharing;
  batch_.prefix_sharing_keeps_bits = keeps_bits;
  plan_ = std::make_unique<Plan>(attention_->plan(batch_));
}

void Workload::forward() const {
  const Tensor query =
      Tensor::contiguous(query_.data(), layer_.query_dtype, {num_tokens(), layer_.num_q_heads, layer_.head_dim});
  const Tensor out =
      Tensor::contiguous(out_.data(), layer_.out_dtype(), {num_tokens(), layer_.num_q_heads, layer_.value_dim()});
  if (layout_ != Layout::dense) {
    attention_->forward(query, cache_, *plan_, out);
    return;
  }
  attention_->forward(
      query, Tensor::contiguous(key_.data(), layer_.kv_dtype, {num_keys_, layer_.num_kv_heads, layer_.head_dim}),
      Tensor::contiguous(value_.data(), layer_.kv_dtype, {num_keys_, layer_.num_kv_heads, layer_.value_dim()}), *plan_,
      out);
}

void Workload::update_cache() const {
  const Tensor key =
      Tensor::contiguous(value_.data(), layer_.query_dtype, {num_tokens(), layer_.num_kv_heads, layer_.head_dim});
  const Tensor value =
      Tensor::contiguous(value_.data(), layer_.query_dtype, {num_tokens(), layer_.num_kv_heads, layer_.value_dim()});
  attention_->update_cache(key, value, cache_, *plan_);
}

int64_t Workload::cache_bytes() const {
  return num_keys_ * layer_.num_kv_heads * (layer_.head_dim + layer_.value_dim()) * size_bytes(layer_.kv_dtype);
}

}  // namespace qkv::bench
