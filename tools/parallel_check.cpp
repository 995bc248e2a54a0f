// Runs a case of context parallelism and compares it with the definition.
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <thread>

#include "case_data.hpp"
#include "check.hpp"
#include "parallel_cases.hpp"
#include "qkv/cuda.hpp"
#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

// The new tokens are read as they come, the context as the cache holds it.
reference::Result expected_of(const Case& c, CaseData& data) {
  const LayerSpec& layer = c.layer;
  Batch batch = data.batch();
  LayerSpec context = layer;
  context.key_run = KeyRun::context;
  context.sinks.clear();
  const reference::Result of_context = reference::attention(context, batch, data.query.view(), data.cache());
  LayerSpec new_tokens = layer;
  new_tokens.key_run = KeyRun::new_tokens;
  new_tokens.cache.reset();
  new_tokens.kv_dtype = layer.query_dtype;
  new_tokens.kv_scales = KvScales::none;
  batch.block_table = batch.slot_mapping = {};
  const reference::Result of_new_tokens =
      reference::attention(new_tokens, batch, data.query.view(), data.key.view(), data.value.view());
  const reference::StateValues merged = reference::merge(
      {{layer.num_q_heads, of_context.out, of_context.lse}, {layer.num_q_heads, of_new_tokens.out, of_new_tokens.lse}});
  return {merged.out, merged.lse};
}

// Heads [begin, end) of all.
reference::Result heads_of(const reference::Result& all, int64_t num_heads, int64_t begin, int64_t end) {
  reference::Result result;
  const auto num_tokens = static_cast<int64_t>(all.lse.size()) / num_heads;
  const int64_t dim = num_tokens == 0 ? 0 : static_cast<int64_t>(all.out.size()) / (num_heads * num_tokens);
  for (int64_t t = 0; t < num_tokens; ++t) {
    const auto row = all.out.begin() + t * num_heads * dim;
    result.out.insert(result.out.end(), row + begin * dim, row + end * dim);
  }
  result.lse.assign(all.lse.begin() + begin * num_tokens, all.lse.begin() + end * num_tokens);
  return result;
}

// One rank's cache: the tokens that it keeps, in pages of its own; everything else is NaN.
struct RankCache {
  RankCache(const ParallelCase& c, CaseData& whole, const Shard& shard);

  std::vector<int32_t> block_table;
  int64_t table_width = 0;
  OwnedTensor key, value, key_scale, value_scale;
};

RankCache::RankCache(const ParallelCase& c, CaseData& whole, const Shard& shard) {
  const LayerSpec& layer = c.attention.layer;
  const int32_t page_size = layer.cache->page_size;
  const auto pages_of = [&](int32_t length) { return (shard.local_length(length) + page_size - 1) / page_size; };
  int64_t num_pages = 1;  // nobody's
  for (const int32_t length : whole.seq_lens) {
    num_pages += pages_of(length);
    table_width = std::max<int64_t>(table_width, pages_of(length));
  }
  table_width += 1;
  int32_t next_page = static_cast<int32_t>(num_pages) - 1;
  for (const int32_t length : whole.seq_lens) {
    for (int64_t i = 0; i < table_width; ++i) block_table.push_back(i < pages_of(length) ? next_page-- : -1);
  }
  key = OwnedTensor(layer.kv_dtype, {num_pages, page_size, layer.num_kv_heads, layer.head_dim});
  value = OwnedTensor(layer.kv_dtype, {num_pages, page_size, layer.num_kv_heads, layer.value_dim()});
  const bool scales_of_tokens = layer.kv_scales == KvScales::per_token_head;
  if (scales_of_tokens) {
    key_scale = OwnedTensor(DType::f32, {num_pages, page_size, layer.num_kv_heads});
    value_scale = OwnedTensor(DType::f32, {num_pages, page_size, layer.num_kv_heads});
  } else {
    key_scale = whole.key_scale;
    value_scale = whole.value_scale;
  }
  for (size_t r = 0; r < whole.seq_lens.size(); ++r) {
    const int32_t context = whole.seq_lens[r] - c.attention.requests[r].q_len;
    for (int32_t local = 0; local < shard.local_length(context); ++local) {
      const int32_t position = shard.position(local);
      const int64_t page = block_table[r * table_width + local / page_size];
      const int64_t whole_page = whole.block_table[r * whole.table_width + position / page_size];
      for (int64_t h = 0; h < layer.num_kv_heads; ++h) {
        const auto copy = [&](const Tensor& from, const Tensor& to) {
          for (int64_t d = 0; d < to.shape[3]; ++d) {
            store(to, {page, local % page_size, h, d}, load(from, {whole_page, position % page_size, h, d}));
          }
        };
        copy(whole.key_cache, key.view());
        copy(whole.value_cache, value.view());
        if (!scales_of_tokens) continue;
        const auto copy_scale = [&](const Tensor& from, const Tensor& to) {
          store(to, {page, local % page_size, h}, load(from, {whole_page, position % page_size, h}));
        };
        copy_scale(whole.key_scale.view(), key_scale.view());
        copy_scale(whole.value_scale.view(), value_scale.view());
      }
    }
  }
}

class RankRun {
 public:
  RankRun(const ParallelCase& c, const std::shared_ptr<Collectives>& collectives, SharedResult& expected)
      : case_(c),
        expected_(expected),
        device_(collectives->device()),
        data_(c.attention),
        attention_(c.spec(), collectives),
        cache_(c, data_, attention_.shard()),
        query_(DType::f32, {0}),
        own_case_(c.attention) {
    const int32_t heads = attention_.num_heads();
    first_head_ = c.exchange == StateExchange::all_gather ? 0 : collectives->rank() * heads;
    own_case_.layer.num_q_heads = heads;
    const int64_t padding = c.attention.extra_rows;
    const LayerSpec& layer = c.attention.layer;
    query_ = OwnedTensor(layer.query_dtype, {num_rows() + padding, heads, layer.head_dim});
    for (int64_t t = 0; t < data_.num_tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < layer.head_dim; ++d) {
          store(query_.view(), {t, h, d}, load(data_.query.view(), {t, first_head_ + h, d}));
        }
      }
    }
    key_ = with_rows(data_.key, num_rows());
    value_ = with_rows(data_.value, num_rows());
  }

  std::string run() {
    const LayerSpec& layer = case_.attention.layer;
    slots_ = shard_slots(batch_without_slots(), layer.cache->page_size, attention_.shard());
    const Batch batch = with_slots();
    std::optional<ContextParallelPlanner> planner;
    if (case_.with_planner) planner.emplace(attention_.planner(limits()));
    const ContextParallelPlan plan = planner ? planner->plan(batch) : attention_.plan(batch);
    OwnedTensor out(layer.out_dtype(), {num_rows(), own_case_.layer.num_q_heads, layer.value_dim()});
    OwnedTensor lse(DType::f32, {own_case_.layer.num_q_heads, num_rows()});
    OwnedTensor workspace(DType::i32, {plan.workspace_bytes() / 4});
    const Placed query(query_, device_), key(key_, device_), value(value_, device_);
    const RankCache before = cache_;
    const Placed keys(cache_.key, device_), values(cache_.value, device_);
    const Placed key_scale(cache_.key_scale, device_), value_scale(cache_.value_scale, device_);
    OwnedTensor scale = data_.output_scale(num_rows(), own_case_.layer.num_q_heads);
    const Placed placed_scale(scale, device_);
    const Placed placed_out(out, device_), placed_lse(lse, device_), placed_workspace(workspace, device_);
    const KvCache cache{keys.view(), values.view(), key_scale.view(), value_scale.view()};
    attention_.forward(query.view(), key.view(), value.view(), cache, plan, placed_workspace.view(), placed_out.view(),
                       placed_lse.view(), {}, placed_scale.view());
    attention_.update_cache(key.view(), value.view(), cache, plan);
    placed_out.fetch();
    placed_lse.fetch();
    placed_scale.fetch();
    placed_workspace.fetch();
    for (const Placed* of : {&keys, &values, &key_scale, &value_scale}) of->fetch();
    if (!out.buffer().guards_intact() || !lse.buffer().guards_intact()) return "guard words of out or lse overwritten";
    if (!workspace.buffer().guards_intact()) return "guard words of the workspace overwritten";
    if (std::string wrong = new_tokens_in_cache(before); !wrong.empty()) return wrong;
    return compare(out, lse, scale);
  }

 private:
  int64_t num_rows() const { return data_.num_tokens + (case_.with_planner ? 3 : 0); }

  PlanLimits limits() const {
    PlanLimits limits;
    limits.max_requests = std::max<int32_t>(1, static_cast<int32_t>(case_.attention.requests.size()));
    limits.max_tokens = num_rows();
    limits.max_seq_len = 1;
    for (const int32_t length : data_.seq_lens) limits.max_seq_len = std::max(limits.max_seq_len, length);
    limits.num_pages = static_cast<int32_t>(cache_.key.view().shape[0]);
    return limits;
  }

  // As many rows as a planner asks for; those of no token are NaN.
  static OwnedTensor with_rows(const OwnedTensor& tokens, int64_t num_rows) {
    const Tensor from = tokens.view();
    OwnedTensor rows(from.dtype, {std::max(num_rows, from.shape[0]), from.shape[1], from.shape[2]});
    for (int64_t t = 0; t < from.shape[0]; ++t) {
      for (int64_t h = 0; h < from.shape[1]; ++h) {
        for (int64_t d = 0; d < from.shape[2]; ++d) store(rows.view(), {t, h, d}, load(from, {t, h, d}));
      }
    }
    return rows;
  }

  Batch batch_without_slots() const {
    Batch batch = data_.batch();
    batch.block_table = Tensor::contiguous(cache_.block_table.data(), DType::i32,
                                           {static_cast<int64_t>(data_.seq_lens.size()), cache_.table_width});
    batch.slot_mapping = {};
    return batch;
  }
  Batch with_slots() const {
    Batch batch = batch_without_slots();
    batch.slot_mapping = Tensor::contiguous(slots_.data(), DType::i64, {static_cast<int64_t>(slots_.size())});
    return batch;
  }

  std::string compare(const OwnedTensor& out, const OwnedTensor& lse, const OwnedTensor& scale) {
    const LayerSpec& layer = case_.attention.layer;
    const reference::Result& of_all = expected_.get([&] { return expected_of(case_.attention, data_); });
    const reference::Result expected =
        heads_of(of_all, layer.num_q_heads, first_head_, first_head_ + own_case_.layer.num_q_heads);
    // Outputs travel in the query's dtype, and values are of size 1.
    constexpr double kLargestValue = 5;
    const double rounding = layer.query_dtype == DType::f32 ? 0 : rounding_of(layer.query_dtype);
    return difference(own_case_, device_, out.view(), lse.view(), expected, scale.view(), kLargestValue * rounding);
  }

  // The cache after the call: what it was, with the new tokens that the rank keeps in its pages, byte for byte.
  std::string new_tokens_in_cache(RankCache expected) const {
    const LayerSpec& layer = case_.attention.layer;
    for (size_t t = 0; t < slots_.size(); ++t) {
      for (int64_t h = 0; slots_[t] >= 0 && h < layer.num_kv_heads; ++h) {
        const auto write = [&](const OwnedTensor& source, const OwnedTensor& pages, OwnedTensor& scales) {
          write_row(data_, layer, source.view(), static_cast<int64_t>(t), slots_[t], h, pages.view(), scales);
        };
        write(data_.key, expected.key, expected.key_scale);
        write(data_.value, expected.value, expected.value_scale);
      }
    }
    const bool same = cache_.key.buffer() == expected.key.buffer() &&
                      cache_.value.buffer() == expected.value.buffer() &&
                      cache_.key_scale.buffer() == expected.key_scale.buffer() &&
                      cache_.value_scale.buffer() == expected.value_scale.buffer();
    return same ? "" : "update_cache: the bytes of the rank's cache differ from those expected";
  }

  const ParallelCase& case_;
  SharedResult& expected_;  // of all heads
  const Device device_;
  CaseData data_;
  ContextParallel attention_;
  RankCache cache_;
  OwnedTensor query_, key_, value_;
  std::vector<int64_t> slots_;
  int64_t first_head_ = 0;
  Case own_case_;  // with the rank's heads
};

void for_each_rank(size_t num_ranks, const std::function<void(size_t)>& run) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < num_ranks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
}

std::string first_of(const std::vector<std::string>& failures) {
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) return fmt::format("rank {}: {}", rank, failures[rank]);
  }
  return "";
}

std::string failure_of_run(const ParallelCase& c, const std::shared_ptr<Collectives>& collectives,
                           SharedResult& expected) {
  try {
    return RankRun(c, collectives, expected).run();
  } catch (const Error& error) {
    return fmt::format("refused: {}", error.what());
  }
}

}  // namespace

std::string failure_of_rank(const ParallelCase& c, const std::shared_ptr<Collectives>& collectives) {
  SharedResult own;
  return failure_of_run(c, collectives, own);
}

std::string failure_of(const ParallelCase& c, const std::vector<std::shared_ptr<Collectives>>& ranks) {
  SharedResult expected;
  std::vector<std::string> failures(ranks.size());
  for_each_rank(ranks.size(), [&](size_t rank) { failures[rank] = failure_of_run(c, ranks[rank], expected); });
  return first_of(failures);
}

std::string first_failure(int32_t num_ranks, Device device,
                          const std::function<std::string(const std::shared_ptr<Collectives>&)>& run) {
  auto ranks = in_process_ranks(num_ranks, device);
  std::vector<std::string> failures(ranks.size());
  for_each_rank(ranks.size(), [&](size_t rank) {
    failures[rank] = run(ranks[rank]);
    ranks[rank].reset();  // nobody waits for a rank that has failed
  });
  return first_of(failures);
}

std::string failure_of(const ParallelCase& c, Device device) {
  SharedResult expected;
  return first_failure(c.num_ranks, device,
                       [&](const std::shared_ptr<Collectives>& rank) { return failure_of_run(c, rank, expected); });
}

std::vector<std::shared_ptr<Collectives>> nccl_ranks_of_all_devices() {
  const int32_t num_ranks = num_cuda_devices();
  if (num_ranks == 0) throw Error(ErrorCode::unavailable, "nccl", "no GPU", "one rank a GPU");
  const NcclUniqueId id = nccl_unique_id();
  std::vector<std::shared_ptr<Collectives>> ranks(num_ranks);
  std::vector<std::exception_ptr> errors(ranks.size());
  for_each_rank(ranks.size(), [&](size_t rank) {
    try {
      ranks[rank] = nccl_ranks(id, num_ranks, static_cast<int32_t>(rank), static_cast<int32_t>(rank));
    } catch (const Error&) {
      errors[rank] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return ranks;
}

}  // namespace qkv::tools
