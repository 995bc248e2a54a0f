// Constants of the few-rows kernel that its parts share, and how its tiles lie in shared memory.
#pragma once

#include "core/index/forward_sm90_few_rows_shape.hpp"

namespace qkv::cuda::few_rows {

namespace shape = index::few_rows;

constexpr int kThreads = key::num_warps * shape::kWarpSize;
constexpr bool kSharedRows = key::request_tile_q < key::tile_q;  // an item's rows are of several requests
constexpr int kNumLanes = shape::num_lanes(key::request_tile_q, key::head_dim_v);
constexpr int kTileKeys = key::tile_kv;
constexpr int kBoxes = kTileKeys / shape::kBoxKeys;
constexpr bool kPaged = key::page_size > 0;
constexpr bool kCopyBoxes = key::page_size % shape::kBoxKeys == 0;  // dense keys, too
constexpr shape::SmemLayout kLayout =
    shape::smem_layout(key::head_dim, key::head_dim_v, key::tile_q, key::tile_kv, key::num_warps, key::num_stages,
                       key::cluster_size, key::request_tile_q);
constexpr int kReceivedBarrier = kLayout.barriers + 2 * key::num_warps * key::num_stages * shape::kBarrierBytes;

// A matrix of 16-bit elements in shared memory: kRows x kDim as columns of kChunk bytes, each column kRows rows high.
// 16-byte units of a row are exchanged by the copy engine's rule for swizzles of kChunk bytes, so that 8 rows of one
// unit lie in 32 different banks.
template <int kDim, int kRows>
struct SwizzledTile {
  static constexpr int kChunk = shape::chunk_bytes(kDim);
  static constexpr int kChunkUnits = kChunk / 16;
  static constexpr int kRowUnits = kDim * shape::kElementBytes / 16;
  static constexpr int kColumnBytes = kRows * kChunk;
  static constexpr int kBytes = kRows * kDim * shape::kElementBytes;

  static __device__ __forceinline__ int swizzle(int row) { return (row * kChunk / 128) % kChunkUnits; }

  static __device__ __forceinline__ int offset(int row, int unit) {
    return unit / kChunkUnits * kColumnBytes + row * kChunk + ((unit % kChunkUnits) ^ swizzle(row)) * 16;
  }

  // The same for unit = 2·pair + odd, with what does not depend on `pair` computed once.
  static __device__ __forceinline__ int lane_offset(int row, int odd) {
    return row * kChunk + (odd ^ swizzle(row)) * 16;
  }
  static __device__ __forceinline__ unsigned address(unsigned base_and_lane_offset, int pair) {
    return (base_and_lane_offset ^ (2 * pair % kChunkUnits * 16)) + 2 * pair / kChunkUnits * kColumnBytes;
  }
};

}  // namespace qkv::cuda::few_rows
