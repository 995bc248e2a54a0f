// The loading warps of the many-rows kernel: keys, values and queries to shared memory, step by step.
#pragma once

#include "dtype.cuh"
#include "mask_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler.cuh"

namespace qkv::cuda::tile {

struct TensorMaps {
  const ptx::TensorMap* query;
  const ptx::TensorMap* key;
  const ptx::TensorMap* value;
};

// Rows are counted in units of 16 bits, whatever their elements are.
constexpr int kUnits = key::head_dim * size_of(key::kv_dtype) / 2;
constexpr int kUnitsV = key::head_dim_v * size_of(key::kv_dtype) / 2;
constexpr int kQueryUnits = key::head_dim * size_of(key::query_dtype) / 2;
constexpr int kBoxRows = index::many_rows_box_rows(key::page_size, key::tile_kv);
constexpr int kBoxes = key::tile_kv / kBoxRows;                   // of a step
constexpr int kColumns = index::many_rows_block_columns(kUnits);  // of a block of keys
constexpr int kQueryColumns = index::many_rows_block_columns(kQueryUnits);

struct BoxPlace {
  int token, page;
};

__device__ __forceinline__ BoxPlace find_key(const ForwardParams& params, int first, int position) {
  if constexpr (key::page_size == 0) {
    return {first + position, 0};
  } else {
    return {position % key::page_size, params.pages[static_cast<long long>(first) + position / key::page_size]};
  }
}

// Where the step's box lies. Table entries behind the last key that counts are not read.
__device__ __forceinline__ BoxPlace find_box(const ForwardParams& params, int first, int box, const Step& step) {
  if constexpr (key::page_size == 0) {
    return {first + step.kv_begin, 0};
  } else {
    const int offset = box * kBoxRows;
    if (offset >= static_cast<int>(step.bits & kStepKeys)) return {0, 0};
    return find_key(params, first, step.kv_begin + offset);
  }
}

__device__ __forceinline__ int count_boxes(const Step& step) {
  return (static_cast<int>(step.bits & kStepKeys) + kBoxRows - 1) / kBoxRows;
}

// kStepHides of each consumer, found by a lane each: the rows of one may see all of a step that is partial for the
// item.
__device__ __forceinline__ unsigned find_hiding(const ForwardParams& params, int word, const Step& step) {
  constexpr int kRows = index::kManyRowsRowsPerConsumer;
  const SeqInfo seq(0, lane_word(word, kWordQLen), lane_word(word, kWordKvLen), 0);
  const int query_begin = lane_word(word, kWordQueryBegin);
  const int num_rows = (lane_word(word, kWordQueryEnd) - query_begin) * key::group_size;
  const int request = lane_word(word, kWordRequest);
  const int keys = step.bits & kStepKeys;
  const int row = lane_index() * kRows;
  bool hides = keys != key::tile_kv;
  if (key::mask && (step.bits & kStepPartial) != 0 && !hides) {
    const int last = min(row + kRows, num_rows) - 1;
    hides = classify_range(MaskContext(params, seq, request), seq.q_pos(query_begin + row / key::group_size),
                           seq.q_pos(query_begin + last / key::group_size), step.kv_begin,
                           step.kv_begin + keys - 1) != TileClass::full;
  }
  return __ballot_sync(kAllLanes, hides && row < num_rows) * kStepHides;
}

constexpr int kKeyBoxBlocks = index::many_rows_key_box_blocks(kUnits, key::page_size, key::tile_kv);
constexpr int kKeyParts = kUnits / kColumns / kKeyBoxBlocks;  // boxes for the same keys

// kWarps warps share a step's boxes, a lane each. The first one also announces the step. after_keys(place, kv_head,
// step) is called by all lanes when the keys of a step are on their way.
template <int kWarps, class AfterKeys>
__device__ __forceinline__ void load_keys(const ForwardParams& params, const ManyRowsParams& many,
                                          const TensorMaps& maps, Control* control, unsigned keys, int warp,
                                          AfterKeys&& after_keys) {
  constexpr int kBoxBlocks = kKeyBoxBlocks, kParts = kKeyParts;
  constexpr int kBoxBytes = kBoxRows * kBoxBlocks * kColumns * 2;
  constexpr int kStageBytes = key::tile_kv * kUnits * 2;
  static_assert(kBoxes * kParts <= 32 * kWarps);
  const int box = (lane_index() * kWarps + warp) / kParts;
  const int block = (lane_index() * kWarps + warp) % kParts;
  keys += (block * key::tile_kv + box * kBoxRows) * (kColumns * 2);
  Ring<2> ring;
  walk_steps<key::tile_kv>(params, many, [&](int word, const Step& step) {
    const BoxPlace place = find_box(params, lane_word(word, kWordFirst), box, step);
    const int kv_head = lane_word(word, kWordKvHead);
    const unsigned bits = step.bits | (warp == 0 ? find_hiding(params, word, step) : 0);
    const unsigned full = shared_address_of(&control->key_full[ring.stage()]);
    ptx::mbarrier_wait(shared_address_of(&control->key_free[ring.stage()]), ring.phase() ^ 1);
    if (warp == 0 && lane_index() == 0) {
      control->steps[ring.stage()] = {step.kv_begin, bits};
      ptx::mbarrier_arrive_expect_bytes(full, count_boxes(step) * kParts * kBoxBytes);
    }
    __syncwarp();
    if (box < count_boxes(step)) {
      ptx::tma_load_5d(keys + ring.stage() * kStageBytes, maps.key, 0, place.token, block, kv_head, place.page, full);
    }
    after_keys(place, kv_head, step);
    ring.advance();
  });
}

// Stages of rows of kRowUnits units, box by box, all columns of a box together. steps: where a stage's step is
// announced, nullptr = nowhere.
template <int kRowUnits, int kStages>
__device__ __forceinline__ void load_rows(const ForwardParams& params, const ManyRowsParams& many,
                                          const ptx::TensorMap* map, unsigned long long* full_barriers,
                                          unsigned long long* free_barriers, unsigned rows, Step* steps) {
  constexpr int kBoxBytes = kBoxRows * kRowUnits * 2;
  constexpr int kStageBytes = key::tile_kv * kRowUnits * 2;
  const int box = lane_index();
  rows += box * kBoxBytes;
  Ring<kStages> ring;
  walk_steps<key::tile_kv>(params, many, [&](int word, const Step& step) {
    const BoxPlace place = find_box(params, lane_word(word, kWordFirst), box, step);
    const int kv_head = lane_word(word, kWordKvHead);
    const unsigned bits = step.bits | (steps != nullptr ? find_hiding(params, word, step) : 0);
    const unsigned full = shared_address_of(&full_barriers[ring.stage()]);
    ptx::mbarrier_wait(shared_address_of(&free_barriers[ring.stage()]), ring.phase() ^ 1);
    if (box == 0) {
      if (steps != nullptr) steps[ring.stage()] = {step.kv_begin, bits};
      ptx::mbarrier_arrive_expect_bytes(full, count_boxes(step) * kBoxBytes);
    }
    __syncwarp();
    if (box < count_boxes(step)) {
      ptx::tma_load_5d(rows + ring.stage() * kStageBytes, map, 0, place.token, 0, kv_head, place.page, full);
    }
    ring.advance();
  });
}

__device__ __forceinline__ void load_values(const ForwardParams& params, const ManyRowsParams& many,
                                            const TensorMaps& maps, Control* control, unsigned values) {
  load_rows<kUnitsV, 2>(params, many, maps.value, control->value_full, control->value_free, values, nullptr);
}

// Lane l: word l of the item, then of its record.
__device__ __forceinline__ int load_record_word(const ForwardParams& params, int word) {
  const int lane = lane_index();
  const int request = lane_word(word, kWordRequest);
  if (lane == kRecordTokenBegin) word = params.query_start_loc[request];
  if (lane == kRecordQLen) word = params.query_start_loc[request + 1];
  if (lane == kRecordKvLen) word = params.seq_lens[request];
  const int q_len = lane_word(word, kRecordQLen) - lane_word(word, kRecordTokenBegin);
  return lane == kRecordQLen ? q_len : word;
}

__device__ __forceinline__ void write_record(const ForwardParams& params, int word, ItemRecord* record) {
  if (lane_index() <= kRecordKvLen) reinterpret_cast<int*>(record)[lane_index()] = word;
  __syncwarp();
  if (lane_index() != 0) return;
  const WorkItem item = record->item;
  record->num_rows = (item.query_end - item.query_begin) * key::group_size;
  const long long token = record->token_begin + item.query_begin, head = item.kv_head * key::group_size;
  const bool is_state = item.state_row >= 0;
  record->out_offset =
      is_state ? item.state_row * key::head_dim_v : token * params.out_token_stride + head * params.out_head_stride;
  record->lse_offset = is_state ? item.state_row : head * params.lse_head_stride + token * params.lse_token_stride;
}

// A warpgroup's rows are whole tokens: one box each.
__device__ __forceinline__ void load_query_boxes(const ptx::TensorMap* map, unsigned slot, unsigned full, int word) {
  constexpr int kConsumerBytes = 64 * kQueryUnits * 2;
  constexpr int kTokens = key::group_size <= 64 ? 64 / key::group_size : 1;
  const int tokens = lane_word(word, kWordQueryEnd) - lane_word(word, kWordQueryBegin);
  const int token = lane_word(word, kRecordTokenBegin) + lane_word(word, kWordQueryBegin);
  const int kv_head = lane_word(word, kWordKvHead);
  if (lane_index() != 0) return;
  const int boxes = (tokens + kTokens - 1) / kTokens;
  ptx::mbarrier_arrive_expect_bytes(full, boxes * kConsumerBytes);
  for (int c = 0; c < boxes; ++c) {
    ptx::tma_load_5d(slot + c * kConsumerBytes, map, 0, 0, token + c * kTokens, 0, kv_head, full);
  }
}

// Rows of any group size, chunk by chunk. Rows behind the last stay as they are: rows never mix.
__device__ __forceinline__ void gather_query(const ForwardParams& params, unsigned slot, unsigned full, int word) {
  constexpr int kElementBytes = size_of(key::query_dtype);
  constexpr int kChunks = kQueryUnits / 8;
  constexpr int kBlockChunks = kQueryColumns / 8;
  const int rows = (lane_word(word, kWordQueryEnd) - lane_word(word, kWordQueryBegin)) * key::group_size;
  const long long token = lane_word(word, kRecordTokenBegin) + lane_word(word, kWordQueryBegin);
  const int head = lane_word(word, kWordKvHead) * key::group_size;
  const char* query = static_cast<const char*>(params.query);
#pragma unroll 1
  for (int i = lane_index(); i < rows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const long long offset = (token + row / key::group_size) * params.query_token_stride +
                             (head + row % key::group_size) * params.query_head_stride + chunk * (16 / kElementBytes);
    const unsigned block = slot + row / 64 * (64 * kQueryUnits * 2) + chunk / kBlockChunks * (64 * kBlockChunks * 16);
    ptx::cp_async_16(block + index::swizzled_offset(row % 64, chunk % kBlockChunks, kQueryColumns),
                     query + offset * kElementBytes, 16);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane_index() == 0) ptx::mbarrier_arrive(full);
}

// after_record(word, i) is called by all lanes when the record of the i-th item has been written.
template <int kSlots, class AfterRecord>
__device__ __forceinline__ void load_queries(const ForwardParams& params, const ManyRowsParams& many,
                                             const TensorMaps& maps, Control* control, unsigned queries,
                                             AfterRecord&& after_record) {
  constexpr int kSlotBytes = key::tile_q * kQueryUnits * 2;
  const int begin = many.cta_begin[blockIdx.x], end = many.cta_begin[blockIdx.x + 1];
  Ring<kSlots> ring;
  int word_next = load_item_word(params, begin, end);
  for (int position = begin; position < end; ++position) {
    const int word = load_record_word(params, word_next);
    word_next = load_item_word(params, position + 1, end);
    const unsigned full = shared_address_of(&control->query_full[ring.stage()]);
    ptx::mbarrier_wait(shared_address_of(&control->query_free[ring.stage()]), ring.phase() ^ 1);
    write_record(params, word, &control->records[(position - begin) % kItemRecords]);
    after_record(word, position - begin);
    const unsigned slot = queries + ring.stage() * kSlotBytes;
    if constexpr (index::many_rows_query_by_box(key::group_size)) {
      load_query_boxes(maps.query, slot, full, word);
    } else {
      gather_query(params, slot, full, word);
    }
    ring.advance();
  }
}

}  // namespace qkv::cuda::tile
