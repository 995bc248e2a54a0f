// The batch's checks: after them no index in a plan can lead outside what the caller handed over, save for the highest
// page and slot, which the cache's size decides when it is given.
#include <algorithm>
#include <cmath>
#include <set>

#include "core/checks.hpp"
#include "core/index/paging.hpp"
#include "core/shown_keys.hpp"
#include "plan/builder.hpp"

namespace qkv::plan {
namespace {

template <class Int>
std::vector<Int> copy_vector(const Tensor& tensor) {
  std::vector<Int> values(static_cast<size_t>(tensor.shape[0]));
  const auto* data = static_cast<const Int*>(tensor.data);
  for (int64_t i = 0; i < tensor.shape[0]; ++i) values[static_cast<size_t>(i)] = data[i * tensor.stride[0]];
  return values;
}

void check_index_vector(const Tensor& tensor, const char* name, DType dtype, const char* axes) {
  check_rank(tensor, name, 1, axes);
  check_dtype(tensor, name, dtype);
  check_host(tensor, name);
}

bool is_encoder(const LayerSpec& layer) {
  return layer.type == AttentionType::encoder || layer.type == AttentionType::encoder_only;
}

void read_query_start_loc(const Tensor& tensor, PlanData& plan) {
  check_index_vector(tensor, "query_start_loc", DType::i32, "[num_requests + 1]");
  if (tensor.shape[0] < 1) refuse("query_start_loc", tensor.describe(), "at least one entry: [num_requests + 1]");
  plan.query_start_loc = copy_vector<int32_t>(tensor);
  plan.num_requests = static_cast<int32_t>(tensor.shape[0] - 1);
  const auto& starts = plan.query_start_loc;
  if (starts[0] != 0) refuse("query_start_loc[0]", starts[0], "0");
  for (size_t i = 1; i < starts.size(); ++i) {
    if (starts[i] < starts[i - 1]) {
      refuse(fmt::format("query_start_loc[{}]", i), starts[i],
             fmt::format("at least query_start_loc[{}] = {}: prefix sums never decrease", i - 1, starts[i - 1]));
    }
  }
  plan.num_tokens = starts.back();
}

int32_t q_len(const PlanData& plan, int32_t request) {
  return plan.query_start_loc[request + 1] - plan.query_start_loc[request];
}

void read_seq_lens(const Tensor& tensor, PlanData& plan) {
  const bool encoder = is_encoder(plan.layer);
  if (encoder && !tensor.is_given()) {
    for (int32_t r = 0; r < plan.num_requests; ++r) plan.seq_lens.push_back(q_len(plan, r));
  } else {
    check_index_vector(tensor, "seq_lens", DType::i32, "[num_requests]");
    check_extent(tensor, "seq_lens", 0, plan.num_requests, "num_requests");
    plan.seq_lens = copy_vector<int32_t>(tensor);
  }
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    const int32_t length = plan.seq_lens[r];
    if (length < 0) refuse(fmt::format("seq_lens[{}]", r), length, "0 or more");
    if (encoder && length != q_len(plan, r)) {
      refuse(
          fmt::format("seq_lens[{}]", r), length,
          fmt::format("{}, the new tokens of the request: an encoder's keys are its queries' tokens", q_len(plan, r)),
          ErrorCode::mismatch);
    }
    if (plan.layer.key_run != KeyRun::all && length < q_len(plan, r)) {
      refuse(fmt::format("seq_lens[{}]", r), length,
             fmt::format("at least {}, the new tokens of the request, with key_run {}", q_len(plan, r),
                         to_string(plan.layer.key_run)),
             ErrorCode::mismatch);
    }
    plan.key_start.push_back(plan.num_keys);
    plan.num_keys += length;
  }
}

void count_shown_keys(PlanData& plan) {
  const index::ShownKeys keys = shown_keys(plan.layer);
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    plan.key_lens.push_back(keys.count(q_len(plan, r), plan.seq_lens[r]));
    if (!plan.layer.cache) plan.page_start.push_back(plan.num_shown_keys);
    plan.num_shown_keys += plan.key_lens.back();
  }
}

void read_block_table(const Tensor& table, PlanData& plan) {
  if (!plan.layer.cache) {
    if (table.is_given()) refuse("block_table", table.describe(), "none: the layer has no cache", ErrorCode::mismatch);
    return;
  }
  check_rank(table, "block_table", 2, "[num_requests, max_pages]");
  check_dtype(table, "block_table", DType::i32);
  check_host(table, "block_table");
  check_extent(table, "block_table", 0, plan.num_requests, "num_requests");
  const int32_t page_size = plan.layer.cache->page_size;
  const auto* entries = static_cast<const int32_t*>(table.data);
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    const int32_t used = index::num_pages(plan.key_lens[r], page_size);
    if (used > table.shape[1]) {
      const std::string shown = plan.key_lens[r] == plan.seq_lens[r]
                                    ? ""
                                    : fmt::format(" keys that the layer is shown, not {}", plan.key_lens[r]);
      refuse(fmt::format("seq_lens[{}]", r), plan.seq_lens[r],
             fmt::format("at most {}{}: block_table holds {} pages of {} tokens a request", table.shape[1] * page_size,
                         shown, table.shape[1], page_size));
    }
    plan.page_start.push_back(static_cast<int64_t>(plan.pages.size()));
    for (int32_t i = 0; i < used; ++i) {
      const int32_t page = entries[r * table.stride[0] + i * table.stride[1]];
      if (page < 0) {
        refuse(fmt::format("block_table[{}, {}]", r, i), page,
               fmt::format("a page number >= 0: the request has {} tokens, {} pages", plan.key_lens[r], used));
      }
      plan.max_page = std::max(plan.max_page, page);
      plan.pages.push_back(page);
    }
  }
}

// Scales per request need to know whose token a slot gets: then every new token has a slot, in the batch's order.
void read_slot_requests(PlanData& plan) {
  const bool cross = plan.layer.type == AttentionType::encoder_decoder;
  const int64_t num_tokens = cross ? plan.num_keys : plan.num_tokens;
  const auto num_slots = static_cast<int64_t>(plan.slot_mapping.size());
  if (num_slots == 0) return;
  if (num_slots != num_tokens) {
    refuse("slot_mapping", fmt::format("{} slots", num_slots),
           fmt::format("{}, one a {} (-1 for those that aren't written), or none: the cache's scales are per request",
                       num_tokens, cross ? "key" : "new token"),
           ErrorCode::mismatch);
  }
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    plan.slot_requests.insert(plan.slot_requests.end(), cross ? plan.seq_lens[r] : q_len(plan, r), r);
  }
}

void read_slot_mapping(const Tensor& slots, PlanData& plan) {
  if (!slots.is_given()) return;
  if (!plan.layer.cache) {
    refuse("slot_mapping", slots.describe(), "none: the layer has no cache", ErrorCode::mismatch);
  }
  check_index_vector(slots, "slot_mapping", DType::i64, "[num_slots]");
  plan.slot_mapping = copy_vector<int64_t>(slots);
  plan.has_slot_mapping = true;
  plan.max_slot = check_slots(plan.slot_mapping);
  if (plan.layer.kv_scales == KvScales::per_request_head) read_slot_requests(plan);
}

// Points each request's mask input at its values.
void bind_operands(PlanData& plan) {
  plan.mask_inputs.clear();
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    mask::ProgramInput input{r, q_len(plan, r), plan.seq_lens[r], {}, shown_keys(plan.layer)};
    for (size_t i = 0; i < plan.operands.size(); ++i) {
      const OperandScope scope = plan.mask.operands[i].scope;
      const int64_t offset = scope == OperandScope::request ? r
                             : scope == OperandScope::key   ? plan.key_start[r]
                                                            : plan.query_start_loc[r];
      input.operand.push_back(plan.operands[i].data() + offset);
    }
    plan.mask_inputs.push_back(std::move(input));
  }
}

void read_operands(const std::vector<MaskOperand>& given, PlanData& plan) {
  std::set<std::string> names;
  for (const MaskOperand& operand : given) {
    if (!names.insert(operand.name).second) {
      refuse(fmt::format("mask_operands[{}]", operand.name), "the same name twice", "each name once");
    }
  }
  for (const OperandDeclaration& declared : plan.mask.operands) {
    const std::string name = fmt::format("mask_operands[{}]", declared.name);
    const bool per_request = declared.scope == OperandScope::request;
    const bool per_key = declared.scope == OperandScope::key;
    const int64_t length = per_request ? plan.num_requests : per_key ? plan.num_keys : plan.num_tokens;
    const char* meaning = per_request ? "one a request" : per_key ? "one a key token" : "one a new token";
    const auto found = std::find_if(given.begin(), given.end(), [&](const auto& o) { return o.name == declared.name; });
    if (found == given.end()) refuse(name, "nothing", fmt::format("i32[{}], {}: the mask reads it", length, meaning));
    check_index_vector(found->values, name.c_str(), DType::i32, meaning);
    check_extent(found->values, name.c_str(), 0, length, meaning);
    plan.operands.push_back(copy_vector<int32_t>(found->values));
  }
  bind_operands(plan);
}

void read_alibi_slopes(const Tensor& slopes, PlanData& plan) {
  if (!plan.layer.alibi_per_request) {
    if (slopes.is_given()) {
      refuse("alibi_slopes", slopes.describe(), "none: the layer is not alibi_per_request", ErrorCode::mismatch);
    }
    return;
  }
  check_rank(slopes, "alibi_slopes", 2, "[num_requests, num_q_heads]");
  check_dtype(slopes, "alibi_slopes", DType::f32);
  check_host(slopes, "alibi_slopes");
  check_extent(slopes, "alibi_slopes", 0, plan.num_requests, "num_requests");
  check_extent(slopes, "alibi_slopes", 1, plan.layer.num_q_heads, "num_q_heads");
  for (int64_t r = 0; r < slopes.shape[0]; ++r) {
    for (int64_t head = 0; head < slopes.shape[1]; ++head) {
      const float slope = static_cast<const float*>(slopes.data)[r * slopes.stride[0] + head * slopes.stride[1]];
      if (!std::isfinite(slope)) refuse(fmt::format("alibi_slopes[{}, {}]", r, head), slope, "a finite number");
      plan.alibi_slopes.push_back(slope);
    }
  }
}

}  // namespace

int64_t check_slots(const std::vector<int64_t>& slots) {
  std::vector<int64_t> used;
  for (size_t t = 0; t < slots.size(); ++t) {
    if (slots[t] < -1) {
      refuse(fmt::format("slot_mapping[{}]", t), slots[t], "a slot of the cache, or -1 for a token that isn't written");
    }
    if (slots[t] >= 0) used.push_back(slots[t]);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  if (twice != used.end()) refuse("slot_mapping", fmt::format("slot {} twice", *twice), "each slot once");
  return used.empty() ? -1 : used.back();
}

PlanData read_batch(const LayerSpec& layer, const Batch& batch) {
  PlanData plan;
  plan.layer = layer;
  const Mask mask = layer.effective_mask();
  plan.mask = mask::compile(mask);
  plan.mask_hash = mask.hash();
  read_query_start_loc(batch.query_start_loc, plan);
  read_seq_lens(batch.seq_lens, plan);
  count_shown_keys(plan);
  read_block_table(batch.block_table, plan);
  read_slot_mapping(batch.slot_mapping, plan);
  read_operands(batch.mask_operands, plan);
  read_alibi_slopes(batch.alibi_slopes, plan);
  read_prefix_groups(batch, plan);
  return plan;
}

PlanData with_block_table(const PlanData& plan, const Tensor& block_table, const Tensor& slot_mapping) {
  if (!plan.shared_rows.empty()) {
    refuse("block_table", block_table.describe(),
           "a plan whose requests share no prefix (prefix_sharing off): its items read several requests' keys at once");
  }
  PlanData other;
  other.layer = plan.layer;
  other.mask = plan.mask;
  other.mask_hash = plan.mask_hash;
  other.num_requests = plan.num_requests;
  other.num_tokens = plan.num_tokens;
  other.num_keys = plan.num_keys;
  other.query_start_loc = plan.query_start_loc;
  other.seq_lens = plan.seq_lens;
  other.key_start = plan.key_start;
  count_shown_keys(other);
  read_block_table(block_table, other);
  read_slot_mapping(slot_mapping, other);
  other.operands = plan.operands;
  bind_operands(other);
  other.alibi_slopes = plan.alibi_slopes;
  other.segments = plan.segments;
  other.items = plan.items;
  other.costs = plan.costs;
  other.merges = plan.merges;
  other.num_state_rows = plan.num_state_rows;
  return other;
}

}  // namespace qkv::plan
