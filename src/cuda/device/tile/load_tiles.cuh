// The loading warps of the many-rows kernel: keys, values and queries to shared memory, step by step.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/warpgroup.cuh"
#include "scheduler.cuh"

namespace qkv::cuda::tile {

struct TensorMaps {
  const ptx::TensorMap* query;
  const ptx::TensorMap* key;
  const ptx::TensorMap* value;
};

constexpr int kBoxRows = index::many_rows_box_rows(key::page_size, key::tile_kv);
constexpr int kBoxes = key::tile_kv / kBoxRows;  // of a step

struct BoxPlace {
  int token, page;
};

// Where the step's box lies. Table entries behind the last key that counts are not read.
__device__ __forceinline__ BoxPlace find_box(const ForwardParams& params, int first, int box, const Step& step) {
  if constexpr (key::page_size == 0) {
    return {first + step.kv_begin, 0};
  } else {
    const int offset = box * kBoxRows;
    const int position = step.kv_begin + offset;
    int page = 0;
    if (offset < static_cast<int>(step.bits & kStepKeys)) {
      page = params.pages[static_cast<long long>(first) + position / key::page_size];
    }
    return {position % key::page_size, page};
  }
}

__device__ __forceinline__ int count_boxes(const Step& step) {
  return (static_cast<int>(step.bits & kStepKeys) + kBoxRows - 1) / kBoxRows;
}

// kWarps warps share a step's boxes, a lane each. The first one also announces the step.
template <int kWarps>
__device__ __forceinline__ void load_keys(const ForwardParams& params, const ManyRowsParams& many,
                                          const TensorMaps& maps, Control* control, unsigned keys, int warp) {
  constexpr int kBoxBlocks = index::many_rows_key_box_blocks(key::head_dim, key::page_size, key::tile_kv);
  constexpr int kParts = key::head_dim / 64 / kBoxBlocks;  // boxes for the same keys
  constexpr int kBoxBytes = kBoxRows * kBoxBlocks * 128;
  constexpr int kStageBytes = key::tile_kv * key::head_dim * 2;
  static_assert(kBoxes * kParts <= 32 * kWarps);
  const int box = (lane_index() * kWarps + warp) / kParts;
  const int block = (lane_index() * kWarps + warp) % kParts;
  keys += block * (key::tile_kv * 128) + box * (kBoxRows * 128);
  Ring<2> ring;
  walk_steps<key::tile_kv>(params, many, [&](int word, const Step& step) {
    const BoxPlace place = find_box(params, lane_word(word, kWordFirst), box, step);
    const int kv_head = lane_word(word, kWordKvHead);
    const unsigned full = shared_address_of(&control->key_full[ring.stage()]);
    ptx::mbarrier_wait(shared_address_of(&control->key_free[ring.stage()]), ring.phase() ^ 1);
    if (warp == 0 && lane_index() == 0) {
      control->steps[ring.stage()] = step;
      ptx::mbarrier_arrive_expect_bytes(full, count_boxes(step) * kParts * kBoxBytes);
    }
    __syncwarp();
    if (box < count_boxes(step)) {
      ptx::tma_load_5d(keys + ring.stage() * kStageBytes, maps.key, 0, place.token, block, kv_head, place.page, full);
    }
    ring.advance();
  });
}

__device__ __forceinline__ void load_values(const ForwardParams& params, const ManyRowsParams& many,
                                            const TensorMaps& maps, Control* control, unsigned values) {
  constexpr int kBoxBytes = kBoxRows * key::head_dim_v * 2;
  constexpr int kStageBytes = key::tile_kv * key::head_dim_v * 2;
  const int box = lane_index();
  values += box * kBoxBytes;
  Ring<2> ring;
  walk_steps<key::tile_kv>(params, many, [&](int word, const Step& step) {
    const BoxPlace place = find_box(params, lane_word(word, kWordFirst), box, step);
    const int kv_head = lane_word(word, kWordKvHead);
    const unsigned full = shared_address_of(&control->value_full[ring.stage()]);
    ptx::mbarrier_wait(shared_address_of(&control->value_free[ring.stage()]), ring.phase() ^ 1);
    if (box == 0) ptx::mbarrier_arrive_expect_bytes(full, count_boxes(step) * kBoxBytes);
    __syncwarp();
    if (box < count_boxes(step)) {
      ptx::tma_load_5d(values + ring.stage() * kStageBytes, maps.value, 0, place.token, 0, kv_head, place.page, full);
    }
    ring.advance();
  });
}

// Lane l: word l of the item's record.
__device__ __forceinline__ int load_record_word(const ForwardParams& params, int word) {
  const int lane = lane_index();
  const int request = lane_word(word, kWordRequest);
  if (lane == kRecordTokenBegin) word = params.query_start_loc[request];
  if (lane == kRecordQLen) word = params.query_start_loc[request + 1];
  if (lane == kRecordKvLen) word = params.seq_lens[request];
  const int q_len = lane_word(word, kRecordQLen) - lane_word(word, kRecordTokenBegin);
  return lane == kRecordQLen ? q_len : word;
}

// A warpgroup's rows are whole tokens: one box each.
__device__ __forceinline__ void load_query_boxes(const ptx::TensorMap* map, unsigned slot, unsigned full, int word) {
  constexpr int kConsumerBytes = 64 * key::head_dim * 2;
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
  constexpr int kChunks = key::head_dim / 8;
  const int rows = (lane_word(word, kWordQueryEnd) - lane_word(word, kWordQueryBegin)) * key::group_size;
  const long long token = lane_word(word, kRecordTokenBegin) + lane_word(word, kWordQueryBegin);
  const int head = lane_word(word, kWordKvHead) * key::group_size;
  const char* query = static_cast<const char*>(params.query);
#pragma unroll 1
  for (int i = lane_index(); i < rows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const long long offset = (token + row / key::group_size) * params.query_token_stride +
                             (head + row % key::group_size) * params.query_head_stride + chunk * 8;
    const unsigned block = slot + row / 64 * (64 * key::head_dim * 2) + chunk / 8 * (64 * 128);
    ptx::cp_async_16(block + index::swizzle_128_bytes(row % 64, chunk % 8), query + offset * 2, 16);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  __syncwarp();
  if (lane_index() == 0) ptx::mbarrier_arrive(full);
}

template <int kSlots>
__device__ __forceinline__ void load_queries(const ForwardParams& params, const ManyRowsParams& many,
                                             const TensorMaps& maps, Control* control, unsigned queries) {
  constexpr int kSlotBytes = key::tile_q * key::head_dim * 2;
  const int begin = many.cta_begin[blockIdx.x], end = many.cta_begin[blockIdx.x + 1];
  Ring<kSlots> ring;
  int word_next = load_item_word(params, begin, end);
  for (int position = begin; position < end; ++position) {
    const int word = load_record_word(params, word_next);
    word_next = load_item_word(params, position + 1, end);
    const unsigned full = shared_address_of(&control->query_full[ring.stage()]);
    ptx::mbarrier_wait(shared_address_of(&control->query_free[ring.stage()]), ring.phase() ^ 1);
    int* record = reinterpret_cast<int*>(&control->records[(position - begin) % kItemRecords]);
    if (lane_index() < kRecordWords) record[lane_index()] = word;
    __syncwarp();
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
