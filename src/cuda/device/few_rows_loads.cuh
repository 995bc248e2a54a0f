// How keys and values of a warp's tiles get into its shared memory: the walk over the item's segments, the page table,
// and two ways to copy (tensor copies where a page holds whole boxes of 16 keys, else 16-byte gathers), which lay down
// the same bytes. Keys and values have rings of their own, so that a stage of keys is refilled while its values are
// still in use. Scales of tokens come along, each lane bringing one. Only pages of the segment's own keys are looked up
// and read.
#pragma once

#include "core/index/few_rows_tiles.hpp"
#include "few_rows_params.hpp"
#include "few_rows_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/lane.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace qkv::cuda::few_rows {

using TileCursor = shape::TileCursor<KeySegment, kTileKeys, kNumLanes>;

__device__ __forceinline__ TileCursor tiles_of(const FewRowsParams& params, const FewRowsItem& item, int key_lane) {
  return {params.forward.segments, item.segment_begin, item.segment_end, item.first, key_lane};
}

// Finds and copies the tiles of a warp's lanes, in order: copy_keys and copy_values of `tile`, then advance.
class TileLoader {
 public:
  __device__ __forceinline__ TileLoader(const FewRowsParams& params, const ptx::TensorMap& key_map,
                                        const ptx::TensorMap& value_map, const FewRowsItem& item, int warp, int lane)
      : tile(tiles_of(params, item, warp)),
        params_(params),
        key_map_(key_map),
        value_map_(value_map),
        item_(item),
        lane_(lane),
        key_lane_(warp) {
    find_lane();
    look_up();
  }

  TileCursor tile;  // the next to be copied

  __device__ __forceinline__ void advance() {
    tile.advance();
    find_lane();
    look_up();
  }

  __device__ __forceinline__ void copy_keys(unsigned shared, unsigned scales, unsigned barrier) {
    if constexpr (kPaged && kCopyBoxes) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int key = box * shape::kBoxKeys;
        box_pages_[box] = __shfl_sync(0xffffffff, pages_[key / shape::kWarpSize], key % shape::kWarpSize);
      }
    }
    copy<KeyBox>(params_.forward.key, key_map_, shared, barrier);
    if constexpr (key::token_scales) copy_scales(params_.forward.key_scale, scales, barrier);
  }

  __device__ __forceinline__ void copy_values(unsigned shared, unsigned scales, unsigned barrier) {
    copy<ValueBox>(params_.forward.value, value_map_, shared, barrier);
    if constexpr (key::token_scales) copy_scales(params_.forward.value_scale, scales, barrier);
  }

 private:
  static constexpr int kOwnKeys = (kTileKeys + shape::kWarpSize - 1) / shape::kWarpSize;
  static constexpr unsigned kPageTokens = kPaged ? key::page_size : 1;

  static __device__ __forceinline__ int page_of(int key) { return static_cast<unsigned>(key) / kPageTokens; }
  static __device__ __forceinline__ int token_of(int key) { return static_cast<unsigned>(key) % kPageTokens; }
  // In the key's page; dense keys are one page, which holds those of all requests.
  __device__ __forceinline__ int token_in_page(int key) const {
    return kPaged ? token_of(key) : static_cast<int>(item_.page_start) + key;
  }

  // The warp's next lane that has tiles, if this one has no more.
  __device__ __forceinline__ void find_lane() {
    if constexpr (key::num_warps < kNumLanes) {
      while (tile.is_over() && key_lane_ + key::num_warps < kNumLanes) {
        key_lane_ += key::num_warps;
        tile = tiles_of(params_, item_, key_lane_);
      }
    }
  }

  // Each lane finds the pages of its own keys. Nothing waits for them before copy_keys: what all lanes load from one
  // address, the compiler would want in a uniform register at once.
  __device__ __forceinline__ void look_up() {
    if constexpr (kPaged) {
#pragma unroll
      for (int i = 0; i < kOwnKeys; ++i) {
        const int key = own_key(i);
        if (key < tile.end) pages_[i] = params_.forward.pages[item_.page_start + page_of(key)];
      }
    }
  }

  // Lane i has the tile's keys i and, in tiles of 64, 32 + i.
  __device__ __forceinline__ int own_key(int i) const { return tile.begin + i * shape::kWarpSize + lane_ % kTileKeys; }

  template <typename Box>
  __device__ __forceinline__ void copy(const KeyValueLayout& layout, const ptx::TensorMap& map, unsigned shared,
                                       unsigned barrier) {
    if constexpr (kCopyBoxes) {
      // Where rows or boxes fill the registers, the elected lane's uniform ones cost spills.
      constexpr bool kElects = (key::tile_q <= 8 && kSmallTile) || !key::takes_turns;
      if (kElects ? ptx::elect_lane() : lane_ == 0) copy_boxes<Box>(map, shared, barrier);
    } else {
      gather<Box>(layout, shared);
    }
  }

  template <typename Box>
  __device__ __forceinline__ void copy_boxes(const ptx::TensorMap& map, unsigned shared, unsigned barrier) {
    int boxes = 1;
#pragma unroll
    for (int box = 1; box < kBoxes; ++box) boxes += tile.begin + box * shape::kBoxKeys < tile.end ? 1 : 0;
    ptx::mbarrier_arrive_expect_bytes(barrier, boxes * Box::kBytes);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int key = tile.begin + box * shape::kBoxKeys;
      if (box >= boxes) break;
      ptx::tma_load_5d(shared + box * Box::kBytes, &map, 0, token_in_page(key), 0, item_.kv_head, box_pages_[box],
                       barrier);
    }
  }

  // Rows behind the segment's end are filled with zeros.
  template <typename Box>
  __device__ __forceinline__ void gather(const KeyValueLayout& layout, unsigned shared) {
    constexpr int kPieces = kTileKeys * Box::kRowUnits;
    const char* base = static_cast<const char*>(layout.data) + item_.kv_head * layout.head_stride * kElementBytes;
    long long own_offsets[kOwnKeys];
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) {
      const int key = own_key(i);
      own_offsets[i] =
          key < tile.end ? (pages_[i] * layout.page_stride + token_of(key) * layout.token_stride) * kElementBytes : 0;
    }
#pragma unroll
    for (int first = 0; first < kPieces; first += shape::kWarpSize) {
      const int piece = first + lane_;
      const int row = piece / Box::kRowUnits;
      const int unit = piece % Box::kRowUnits;
      const long long own_offset = own_offsets[kOwnKeys == 1 ? 0 : first / Box::kRowUnits / shape::kWarpSize];
      const long long offset = __shfl_sync(0xffffffff, own_offset, row % shape::kWarpSize);
      const bool is_read = tile.begin + row < tile.end;
      if (kPieces % shape::kWarpSize != 0 && piece >= kPieces) break;
      ptx::cp_async_16(shared + row / shape::kBoxKeys * Box::kBytes + Box::offset(row % shape::kBoxKeys, unit),
                       base + offset + unit * 16, is_read ? 16 : 0);
    }
  }

  // Lane i brings that of the tile's key i; of keys behind the segment's end, zero. A barrier that boxes arrive at
  // counts the lanes, too; gathers are in a group.
  __device__ __forceinline__ void copy_scales(const KeyValueScales& scales, unsigned shared, unsigned barrier) {
    static_assert(kOwnKeys == 1 || !key::token_scales);
    const int key = tile.begin + lane_;
    if (lane_ < kTileKeys) {
      const bool is_read = key < tile.end;
      const long long offset = pages_[0] * scales.page_stride + token_in_page(key) * scales.token_stride;
      const float* base = scales.data + item_.kv_head * scales.head_stride;
      ptx::cp_async_4(shared + lane_ * static_cast<int>(sizeof(float)), base + (is_read ? offset : 0), is_read ? 4 : 0);
    }
    if constexpr (kCopyBoxes) ptx::cp_async_arrive(barrier);
  }

  const FewRowsParams& params_;
  const ptx::TensorMap& key_map_;
  const ptx::TensorMap& value_map_;
  const FewRowsItem& item_;
  const int lane_;
  int key_lane_;
  int pages_[kOwnKeys] = {};    // of this lane's keys
  int box_pages_[kBoxes] = {};  // of boxes, each of which lies in one page
};

}  // namespace qkv::cuda::few_rows
