#include "plan/capacity.hpp"

#include <algorithm>

#include "core/checks.hpp"
#include "core/index/paging.hpp"
#include "core/shown_keys.hpp"
#include "plan/plan_data.hpp"

namespace qkv::plan {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Requests that one of the two kernels runs, and how far they can be cut.
struct Share {
  int64_t requests;
  int64_t blocks;  // of rows
  int64_t splits;  // of all blocks that are split
  int64_t segments;
  int64_t state_rows;  // of one query head
};

// `tokens`: new tokens of a request that is split, at most.
int64_t state_tokens(const PlanLimits& limits, const index::SplitBounds& bounds, int64_t tokens, int64_t splits) {
  const int64_t by_request = std::min<int64_t>(tokens, limits.max_query_len) * splits;
  const int64_t by_token = index::splits_of_request(bounds, limits.max_seq_len) * limits.max_tokens;
  return std::min(by_request, by_token);
}

// Runs of keys of one class, then cut where splits end.
int64_t num_segments(const PlanLimits& limits, int64_t max_runs, int64_t blocks, int64_t tile_kv, int64_t splits) {
  const int64_t of_a_block = std::min<int64_t>(max_runs, ceil_div(limits.max_seq_len, tile_kv));
  return blocks * of_a_block + splits;
}

Share few_rows_share(const PlanLimits& limits, const CutBounds& bounds, int32_t group_size, int64_t max_runs) {
  const int64_t tokens = bounds.few_rows / group_size;
  if (tokens == 0) return {};
  Share share{};
  share.requests = std::min<int64_t>(limits.max_requests, limits.max_tokens);
  share.blocks = share.requests;
  share.splits = index::splits_of_batch(bounds.few_rows_splits, share.requests, limits.max_seq_len, limits.max_keys);
  share.segments = num_segments(limits, max_runs, share.blocks, bounds.few_rows_tile_kv, share.splits);
  share.state_rows = state_tokens(limits, bounds.few_rows_splits, tokens, share.splits);
  return share;
}

Share many_rows_share(const PlanLimits& limits, const CutBounds& bounds, int32_t group_size, int64_t max_runs) {
  const int64_t least_tokens = bounds.few_rows / group_size + 1;
  if (limits.max_query_len < least_tokens) return {};
  Share share{};
  share.requests = std::min<int64_t>(limits.max_requests, limits.max_tokens / least_tokens);
  const int64_t tokens_per_block = std::max<int64_t>(1, bounds.rows_per_block / group_size);
  share.blocks = share.requests + limits.max_tokens / tokens_per_block;
  share.splits = index::splits_of_batch(bounds.many_rows_splits, share.requests, limits.max_seq_len, limits.max_keys);
  // A request that is split has at most rows_per_block_most rows, and may be several blocks.
  const int64_t split_tokens = std::max<int64_t>(1, bounds.rows_per_block_most / group_size);
  share.splits *= ceil_div(split_tokens, tokens_per_block);
  share.segments = num_segments(limits, max_runs, share.blocks, bounds.tile_kv, share.splits);
  share.state_rows = state_tokens(limits, bounds.many_rows_splits, split_tokens, share.splits);
  return share;
}

template <class Int>
void check_at_least(const char* name, Int value, Int least) {
  if (value < least) refuse(fmt::format("limits.{}", name), value, fmt::format("{} or more", least));
}

}  // namespace

// The device's planner classifies tiles by what it knows of a whole request, and knows no tokens one by one.
std::optional<Error> reason_against_plans_on_device(const LayerSpec& layer) {
  constexpr const char* kName = "limits.plans_on_device";
  if (layer.cache && layer.kv_scales == KvScales::per_request_head) {
    return Error(ErrorCode::unsupported, kName, "true, for a cache with scales per request",
                 "false: which request a slot belongs to is found on the host");
  }
  const mask::Program program = mask::compile(layer.effective_mask());
  bool has_token_operands = false;
  for (const OperandDeclaration& operand : program.operands) {
    has_token_operands |= operand.scope != OperandScope::request;
  }
  if (has_token_operands || program.depends_on_head) {
    return Error(ErrorCode::unsupported, kName, fmt::format("true, for the mask {}", layer.effective_mask().text()),
                 "false: the mask names heads or has operands of single tokens; plan such batches from host arrays");
  }
  return std::nullopt;
}

PlanLimits checked_limits(const LayerSpec& layer, PlanLimits limits) {
  check_at_least("max_requests", limits.max_requests, 1);
  check_at_least<int64_t>("max_tokens", limits.max_tokens, 1);
  check_at_least("max_query_len", limits.max_query_len, 0);
  check_at_least("max_seq_len", limits.max_seq_len, 1);
  check_at_least<int64_t>("max_keys", limits.max_keys, 0);
  if (limits.plans_on_device) {
    if (const auto reason = reason_against_plans_on_device(layer)) throw *reason;
  }
  if (limits.max_tokens > INT32_MAX) refuse("limits.max_tokens", limits.max_tokens, "below 2^31");
  if (layer.cache) {
    check_at_least("num_pages", limits.num_pages, 1);
  } else if (limits.num_pages != 0) {
    refuse("limits.num_pages", limits.num_pages, "0: the layer has no cache", ErrorCode::mismatch);
  }
  const auto tokens = static_cast<int32_t>(limits.max_tokens);
  limits.max_query_len = limits.max_query_len == 0 ? tokens : std::min(limits.max_query_len, tokens);
  const int64_t all_keys = int64_t{limits.max_requests} * limits.max_seq_len;
  limits.max_keys = limits.max_keys == 0 ? all_keys : std::min(limits.max_keys, all_keys);
  return limits;
}

PlanLimits shown_limits(const LayerSpec& layer, PlanLimits limits) {
  const index::ShownKeys keys = shown_keys(layer);
  if (keys.run == index::kNewTokenKeys) {
    limits.max_seq_len = limits.max_query_len;
    limits.max_keys = std::min(limits.max_tokens, int64_t{limits.max_requests} * limits.max_query_len);
  } else if (keys.num_ranks > 1) {
    limits.max_seq_len = keys.count(0, limits.max_seq_len);
    // Of each request an even share, and at most a run of the interleaving more.
    const int64_t even_shares = limits.max_keys / keys.num_ranks + int64_t{limits.max_requests} * keys.interleave_size;
    limits.max_keys = std::min({limits.max_keys, even_shares, int64_t{limits.max_requests} * limits.max_seq_len});
  }
  return limits;
}

PlanCapacity capacity_of(const LayerSpec& layer, const PlanLimits& limits, const CutBounds& bounds) {
  const mask::Program program = mask::compile(layer.effective_mask());
  const int32_t max_runs = mask::max_segments(program);
  const PlanLimits shown = shown_limits(layer, limits);
  const Share few = few_rows_share(shown, bounds, layer.group_size(), max_runs);
  const Share many = many_rows_share(shown, bounds, layer.group_size(), max_runs);
  PlanCapacity capacity;
  capacity.query_len = limits.max_query_len;
  capacity.seq_len = limits.max_seq_len;
  capacity.on_device = limits.plans_on_device;
  capacity.blocks = few.blocks + many.blocks;
  capacity.requests = limits.max_requests;
  capacity.tokens = limits.max_tokens;
  capacity.keys = limits.max_keys;
  if (layer.cache) {
    const int32_t page_size = layer.cache->page_size;
    capacity.pages = std::min<int64_t>(limits.max_requests + shown.max_keys / page_size,
                                       int64_t{limits.max_requests} * index::num_pages(shown.max_seq_len, page_size));
    capacity.slots = max_slots(layer, limits);
  }
  capacity.few_rows_items = (few.blocks + few.splits) * layer.num_kv_heads;
  capacity.many_rows_items = (many.blocks + many.splits) * layer.num_kv_heads;
  // Where the mask tells heads apart, each KV head has segments of its own.
  capacity.segments = (few.segments + many.segments) * (program.depends_on_head ? layer.num_kv_heads : 1);
  capacity.few_rows_merges = few.blocks * layer.num_kv_heads;
  capacity.many_rows_merges = many.blocks * layer.num_kv_heads;
  capacity.state_rows = (few.state_rows + many.state_rows) * layer.num_q_heads;
  return capacity;
}

}  // namespace qkv::plan
