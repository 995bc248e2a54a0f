#include "cuda/placed_plan.hpp"

#include <algorithm>
#include <cstring>

#include "core/checks.hpp"
#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "jit/driver.hpp"

namespace qkv::cuda {
namespace {

constexpr size_t kAlignment = 64;  // of an array: a few-rows item is a cache line

size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t states_lse_offset(const LayerSpec& layer, int64_t num_state_rows) {
  return static_cast<size_t>(num_state_rows * layer.value_dim()) * sizeof(float);
}

}  // namespace

int64_t DevicePlan::workspace_bytes(const LayerSpec& layer, int64_t num_state_rows) {
  return num_state_rows * (layer.value_dim() + 1) * static_cast<int64_t>(sizeof(float));
}

DevicePlan::DevicePlan(const LayerSpec& layer, const PlacementRules& rules, const plan::PlanCapacity& capacity,
                       const Tensor& workspace, int32_t device_index)
    : layer_(layer), rules_(rules), device_index_(device_index), is_exact_(false) {
  allocate(array_bytes(layer, rules, capacity), capacity.state_rows, workspace,
           [&](size_t num_bytes) { return DeviceBuffer(device_index, num_bytes); });
  staging_.emplace(total_bytes_);
  bind_launches();
  bind_arrays();
  for (FewRowsLaunch& launch : few_rows_launches) {
    if (launch.shared_tokens == nullptr) launch.cluster_size = index::few_rows::kMaxClusterSplits;
  }
  // Launches that may meet no merge at all should be small: CTAs take turns at the rows, too.
  constexpr int32_t kEnoughRows = 16;
  max_rows_of_merges = std::min(rules.max_rows_of_merges, kEnoughRows);
}

DevicePlan::DevicePlan(const plan::PlanData& plan, const PlacementRules& rules, int32_t device_index,
                       jit::CUstream stream)
    : layer_(plan.layer), rules_(rules), device_index_(device_index), is_exact_(true) {
  const PlanLists lists = make_plan_lists(plan, rules, ClusterUse::where_most_join);
  ArrayBytes bytes{};
  const auto arrays = lists.arrays(plan);
  for (int32_t i = 0; i < kNumPlanArrays; ++i) bytes[i] = arrays[i].size();
  allocate(bytes, plan.num_state_rows, {},
           [&](size_t num_bytes) { return DeviceBuffer::on_stream(device_index, num_bytes, stream); });
  bind_launches();
  bind_arrays();
  for (FewRowsLaunch& launch : few_rows_launches) {
    if (launch.shared_tokens != nullptr) continue;
    launch.cluster_size = lists.few_rows_sm90[few_rows_tile_number(launch.tile_q)].cluster_size;
  }
  max_rows_of_merges = lists.max_rows_of_merges;
  std::vector<std::byte> image(total_bytes_);
  copy(plan, lists, image.data(), stream);
}

void DevicePlan::allocate(const ArrayBytes& bytes, int64_t num_state_rows, const Tensor& workspace,
                          const BufferMaker& make_buffer) {
  bytes_ = bytes;
  for (int32_t i = 0; i < kNumPlanArrays; ++i) {
    offset_[i] = total_bytes_;
    total_bytes_ += round_up(bytes[i]);
  }
  arrays_ = make_buffer(total_bytes_);
  const int64_t state_bytes = workspace_bytes(layer_, num_state_rows);
  if (workspace.is_given()) {
    forward_.state_out = static_cast<float*>(workspace.data);
  } else {
    own_states_ = make_buffer(static_cast<size_t>(state_bytes));
    forward_.state_out = own_states_.as<float>();
  }
  forward_.state_lse = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(forward_.state_out) +
                                                states_lse_offset(layer_, num_state_rows));
}

void DevicePlan::add_few_rows_launches(const PlanCounts* counts) {
  for (int32_t tile = 0; tile < kFewRowsTiles; ++tile) {
    const int64_t most_items = most<FewRowsItem>(kFewRowsSm90 + tile);
    if (most_items == 0) continue;
    few_rows_launches.push_back({4 << tile, is_exact_, is_exact_ ? most_items : items_of_clustered_room(most_items),
                                 array<const FewRowsItem>(kFewRowsSm90 + tile), &counts->few_rows_sm90[tile]});
  }
}

void DevicePlan::add_shared_launches(const PlanCounts* counts) {
  for (int32_t tile = 0; tile < kFewRowsTiles; ++tile) {
    const int64_t most_items = most<FewRowsItem>(kSharedSm90 + tile);
    if (most_items == 0) continue;
    few_rows_launches.push_back({4 << tile, is_exact_, most_items, array<const FewRowsItem>(kSharedSm90 + tile),
                                 &counts->shared_sm90[tile], shared_tokens});
  }
}

void DevicePlan::bind_launches() {
  const auto* counts = array<const PlanCounts>(kCounts);
  shared_tokens = array<const SharedToken>(kSharedTokens);
  shared_few_rows = {array<const WorkItem>(kSharedItems), &counts->shared_few_rows, most<WorkItem>(kSharedItems)};
  // Shared items are the longest: they go first. In a planner's launches there may be none: then these pass unseen
  // behind the others.
  if (is_exact_) add_shared_launches(counts);
  add_few_rows_launches(counts);
  if (!is_exact_) add_shared_launches(counts);
  tickets = array<int>(kTickets);
  few_rows = {array<const WorkItem>(kFewRowsItems), &counts->few_rows, most<WorkItem>(kFewRowsItems)};
  many_rows = {array<const WorkItem>(kManyRowsItems), &counts->many_rows, most<WorkItem>(kManyRowsItems)};
  cta_begin = array<const int>(kCtaBegin);
  num_ctas = many_rows.most == 0 ? 0 : std::max(static_cast<int32_t>(most<int>(kCtaBegin)) - 1, 0);
  max_merges = most<MergeItem>(kMerges);
  if (!is_exact_) num_slots = &counts->slots;
  max_slots = most<int64_t>(kSlots);
  merge_.items = array<const MergeItem>(kMerges);
  merge_.num_items = &counts->merges;
  merge_.states = forward_.state_out;
  merge_.states_lse = forward_.state_lse;
}

void DevicePlan::bind_arrays() {
  slots = array<const int64_t>(kSlots);
  slot_requests = bytes_[kSlotRequests] > 0 ? array<const int>(kSlotRequests) : nullptr;

  forward_.pages = array<const int>(kPages);
  forward_.page_start = array<const long long>(kPageStart);
  forward_.page_size = layer_.cache ? layer_.cache->page_size : 0;
  forward_.rank = layer_.shard.rank;
  forward_.query_start_loc = array<const int>(kQueryStartLoc);
  forward_.seq_lens = array<const int>(kSeqLens);
  forward_.segments = array<const KeySegment>(kSegments);
  forward_.key_start = array<const long long>(kKeyStart);
  for (int32_t i = 0; i < kMaxMaskOperands; ++i) forward_.mask_operands[i] = array<const int>(kOperands + i);
  if (layer_.alibi_per_request) {
    forward_.alibi_slopes = array<const float>(kAlibiSlopes);
    forward_.alibi_request_stride = layer_.num_q_heads;
  }
  merge_.query_start_loc = forward_.query_start_loc;
}

PlanBatchParams DevicePlan::read_from(const plan::DeviceBatch& batch, const plan::PlanCapacity& capacity) {
  forward_.query_start_loc = batch.query_start_loc;
  forward_.seq_lens = batch.seq_lens;
  forward_.pages = batch.block_table;
  for (size_t i = 0; i < batch.operands.size(); ++i) forward_.mask_operands[i] = batch.operands[i];
  if (layer_.alibi_per_request) forward_.alibi_slopes = batch.alibi_slopes;
  merge_.query_start_loc = batch.query_start_loc;
  slots = batch.slot_mapping;

  PlanBatchParams params{};
  params.forward = forward_;
  params.num_requests = batch.num_requests;
  params.num_slots = batch.num_slots;
  params.block_table_stride = batch.block_table_stride;
  params.max_query_len = capacity.query_len;
  params.max_seq_len = capacity.seq_len;
  params.few_rows_sm90 = rules_.few_rows_sm90;
  params.num_ctas = num_ctas;
  PlanArrays& arrays = params.arrays;
  arrays.counts = array<PlanCounts>(kCounts);
  arrays.cta_begin = array<int>(kCtaBegin);
  arrays.key_start = array<long long>(kKeyStart);
  arrays.page_start = array<long long>(kPageStart);
  arrays.tickets = tickets;
  arrays.merges = array<MergeItem>(kMerges);
  arrays.few_rows = array<WorkItem>(kFewRowsItems);
  arrays.many_rows = array<WorkItem>(kManyRowsItems);
  for (int32_t tile = 0; tile < kFewRowsTiles; ++tile) {
    arrays.few_rows_sm90[tile] = array<FewRowsItem>(kFewRowsSm90 + tile);
    arrays.max_items[tile] = static_cast<int>(most<FewRowsItem>(kFewRowsSm90 + tile));
  }
  arrays.segments = array<KeySegment>(kSegments);
  arrays.blocks = bytes_[kBlocks] > 0 ? array<PlanBlock>(kBlocks) : nullptr;
  arrays.max_items[kListFewRows] = static_cast<int>(most<WorkItem>(kFewRowsItems));
  arrays.max_items[kListManyRows] = static_cast<int>(most<WorkItem>(kManyRowsItems));
  arrays.max_blocks = static_cast<int>(capacity.blocks);
  arrays.max_segments = static_cast<int>(most<KeySegment>(kSegments));
  arrays.max_tickets = static_cast<int>(most<int>(kTickets));
  arrays.max_merges = static_cast<int>(most<MergeItem>(kMerges));
  arrays.max_state_rows = static_cast<int>(capacity.state_rows);
  return params;
}

void DevicePlan::update(const plan::PlanData& plan, jit::CUstream stream) {
  bind_arrays();  // a batch on the device may have been in its place
  copy(plan, make_plan_lists(plan, rules_, ClusterUse::always), staging_->next(), stream);
  staging_->mark_copied(stream);
}

void DevicePlan::copy(const plan::PlanData& plan, const PlanLists& lists, std::byte* image,
                      jit::CUstream stream) const {
  const auto arrays = lists.arrays(plan);
  for (int32_t i = 0; i < kNumPlanArrays; ++i) {
    if (arrays[i].size() <= bytes_[i]) continue;
    refuse("plan", fmt::format("{} bytes of array {}", arrays[i].size(), i), fmt::format("at most {}", bytes_[i]),
           ErrorCode::internal);
  }
  // Gaps are shorter to copy than another copy is to start.
  constexpr size_t kLeastGap = 16384;
  size_t begin = 0;
  size_t end = 0;
  const auto copy_run = [&] {
    if (begin == end) return;
    jit::check(jit::driver().memcpy_htod_async(arrays_.address() + begin, image + begin, end - begin, stream),
               "cuMemcpyHtoDAsync", [&] { return fmt::format("{} bytes of a plan", end - begin); });
  };
  for (int32_t i = 0; i < kNumPlanArrays; ++i) {
    if (arrays[i].empty()) continue;
    std::memcpy(image + offset_[i], arrays[i].data(), arrays[i].size());
    if (offset_[i] > end + kLeastGap) {
      copy_run();
      begin = offset_[i];
    }
    end = offset_[i] + arrays[i].size();
  }
  copy_run();
}

uint32_t DevicePlan::grid_of(int64_t most_items, int32_t ctas_per_multiprocessor) const {
  if (is_exact_) return static_cast<uint32_t>(most_items);
  const int64_t enough = int64_t{device_facts(device_index_).num_multiprocessors} * ctas_per_multiprocessor;
  return static_cast<uint32_t>(std::min(most_items, enough));
}

void DevicePlan::fill(ForwardParams& params) const { params = forward_; }

void DevicePlan::fill(MergePlanParams& params) const { params = merge_; }

}  // namespace qkv::cuda
