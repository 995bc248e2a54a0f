// Brings rows of keys or values of one KV head into shared memory with cp.async, through the page table or from dense
// rows. Rows of a tile are shared out to the warps; lane r of a warp looks up the page of the warp's row r.
#pragma once

#include "params.hpp"
#include "ptx/cp_async.cuh"
#include "ptx/lane.cuh"
#include "seq_info.cuh"

namespace qkv::cuda {

// Keys [begin, end) of a tile of the absolute grid; end may lie within the tile or far behind it.
class KeyTile {
 public:
  __device__ __forceinline__ KeyTile() : begin_and_class_(-1), end_(-1) {}  // no tile
  // begin is a multiple of the tile's keys, an even number.
  __device__ __forceinline__ KeyTile(int begin, int end, bool full) : begin_and_class_(begin | full), end_(end) {}

  __device__ __forceinline__ bool exists() const { return begin_and_class_ >= 0; }
  __device__ __forceinline__ int begin() const { return begin_and_class_ & ~1; }
  __device__ __forceinline__ int end() const { return end_; }
  __device__ __forceinline__ bool is_full() const { return (begin_and_class_ & 1) != 0; }

 private:
  int begin_and_class_;
  int end_;
};

// The tiles of an item, one after another.
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const WorkItem& item)
      : segment_(item.segment_begin), segment_end_(item.segment_end), position_(-1) {}

  template <int kTileKv>
  __device__ __forceinline__ KeyTile next(const KeySegment* segments) {
    if (segment_ == segment_end_) return {};
    const KeySegment segment = segments[segment_];
    const int begin = position_ < 0 ? segment.begin : position_;
    position_ = begin + kTileKv;
    if (position_ >= segment.end) {
      position_ = -1;
      ++segment_;
    }
    return {begin, segment.end, segment.full != 0};
  }

 private:
  int segment_;
  int segment_end_;
  int position_;  // -1 = where the segment begins
};

// kPageSize 0: dense rows. kRows: rows of a tile that a warp brings, at most 32.
template <int kPageSize, int kRows>
class PageLookup {
  static_assert(kRows >= 1 && kRows <= 32);

 public:
  __device__ __forceinline__ PageLookup(const ForwardParams& params, const SeqInfo& seq, int warp)
      : pages_(params.pages + (kPageSize > 0 ? seq.key_begin : 0)), first_row_(warp * kRows), page_(0) {}

  // Reads the table for a tile that is loaded later. Entries of keys behind the tile's end are not touched.
  __device__ __forceinline__ void find(const KeyTile& tile) {
    if constexpr (kPageSize > 0) {
      const int row = ptx::lane_id();
      if (tile.exists() && row < kRows)
        page_ = pages_[min(tile.begin() + first_row_ + row, tile.end() - 1) / kPageSize];
    }
  }

  // Copies kChunks·16 bytes of each row, of which the first `used_chunks` are the row's own; rows behind the end become
  // zero. `base` is the first byte of page 0, or of the request's first dense row, at the KV head.
  template <int kChunks, int kRowBytes>
  __device__ __forceinline__ void load(const char* base, long long page_bytes, long long token_bytes,
                                       const KeyTile& tile, unsigned shared, int used_chunks = kChunks) const {
    const int lane = ptx::lane_id();
    constexpr int kTotal = kRows * kChunks;
    constexpr int kSteps = (kTotal + 31) / 32;
    constexpr int kUnroll = kSteps <= 4 ? kSteps : 4;  // addresses under way cost registers
#pragma unroll kUnroll
    for (int i = 0; i < kSteps; ++i) {
      const int index = min(i * 32 + lane, kTotal - 1);
      const int row = index / kChunks;
      const int chunk = index % kChunks;
      const int position = tile.begin() + first_row_ + row;
      const bool used = position < tile.end();
      const int page = kPageSize > 0 ? __shfl_sync(0xffffffff, page_, row) : 0;
      const long long offset = offset_of(position, page, page_bytes, token_bytes);
      if (kTotal % 32 != 0 && i * 32 + lane >= kTotal) continue;
      if (chunk >= used_chunks) continue;
      ptx::cp_async_16(shared + (first_row_ + row) * kRowBytes + chunk * 16, base + (used ? offset + chunk * 16 : 0),
                       used ? 16 : 0);
    }
  }

  // One f32 a row, lane r that of the warp's row r; of rows behind the end, zero. `base`: of page 0, or of the
  // request's first dense row.
  __device__ __forceinline__ void load_words(const float* base, long long page_stride, long long token_stride,
                                             const KeyTile& tile, unsigned shared) const {
    const int row = ptx::lane_id();
    if (row >= kRows) return;
    const int position = tile.begin() + first_row_ + row;
    const bool used = position < tile.end();
    const long long offset = offset_of(position, page_, page_stride, token_stride);
    ptx::cp_async_4(shared + (first_row_ + row) * 4, base + (used ? offset : 0), used ? 4 : 0);
  }

 private:
  // Of a row, from the first of the base's, in units of the strides.
  static __device__ __forceinline__ long long offset_of(int position, int page, long long page_stride,
                                                        long long token_stride) {
    if constexpr (kPageSize > 0) return page * page_stride + position % kPageSize * token_stride;
    return position * token_stride;
  }

  const int* pages_;
  int first_row_;
  int page_;  // of row first_row_ + lane
};

}  // namespace qkv::cuda
