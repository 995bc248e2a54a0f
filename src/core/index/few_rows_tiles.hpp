// Which tiles of keys a lane of the few-rows kernel takes: every num_lanes-th tile of an item's segments, counted
// through all of them.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index::few_rows {

// Segments {begin, end, full} begin at multiples of kTileKeys.
template <class Segment, int kTileKeys, int kNumLanes>
struct TileCursor {
  const Segment* segments;
  int next, last;  // of them, those behind the tile's
  int begin;       // first key of the tile; the tiles are over when it is not below `end`
  int end;         // of the segment
  bool partial;

  // first: the segment at segment_begin, {0, 0, 1} if there is none.
  QKV_HOST_DEVICE constexpr TileCursor(const Segment* all_segments, int segment_begin, int segment_end,
                                       const Segment& first, int key_lane)
      : segments(all_segments),
        next(segment_begin + 1),
        last(segment_end),
        begin(first.begin + key_lane * kTileKeys),
        end(first.end),
        partial(first.full == 0) {
    settle();
  }

  QKV_HOST_DEVICE constexpr bool is_over() const { return begin >= end; }

  QKV_HOST_DEVICE constexpr void advance() {
    begin += kNumLanes * kTileKeys;
    settle();
  }

  // Tiles counted behind the segment's end are tiles of the segments that follow.
  QKV_HOST_DEVICE constexpr void settle() {
    while (begin >= end && next < last) {
      const int behind = begin - (end + kTileKeys - 1) / kTileKeys * kTileKeys;
      const Segment& segment = segments[next++];
      begin = segment.begin + behind;
      end = segment.end;
      partial = segment.full == 0;
    }
  }
};

}  // namespace qkv::index::few_rows
