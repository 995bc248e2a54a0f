// Where a matrix lies in shared memory: kRows rows of kRowBytes as columns of kChunk bytes, each column kRows rows
// high. 16-byte units of a row are exchanged by the copy engine's rule for swizzles of kChunk bytes (16: none), so that
// 8 rows of one unit lie in 32 different banks. The matrix begins at a multiple of 8 chunks, as the engine's rule asks.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

// The widest piece of a row that the copy engine lays down as one swizzled column.
QKV_HOST_DEVICE constexpr int chunk_bytes(int row_bytes) {
  return row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : row_bytes % 32 == 0 ? 32 : 16;
}

template <int kRowBytes, int kRows>
struct SwizzledTile {
  static_assert(kRowBytes % 16 == 0 && kRows % 4 == 0);
  static constexpr int kChunk = chunk_bytes(kRowBytes);
  static constexpr int kChunkUnits = kChunk / 16;
  static constexpr int kRowUnits = kRowBytes / 16;
  static constexpr int kColumnBytes = kRows * kChunk;
  static constexpr int kBytes = kRows * kRowBytes;

  QKV_HOST_DEVICE static constexpr int swizzle(int row) { return (row * kChunk / 128) % kChunkUnits; }

  QKV_HOST_DEVICE static constexpr int offset(int row, int unit) {
    return unit / kChunkUnits * kColumnBytes + row * kChunk + ((unit % kChunkUnits) ^ swizzle(row)) * 16;
  }

  // The same for unit = 2·pair + odd, from what does not depend on `pair`: offset(row, odd), added to the tile's begin.
  QKV_HOST_DEVICE static constexpr unsigned address(unsigned begin_and_odd_offset, int pair) {
    return (begin_and_odd_offset ^ (2 * pair % kChunkUnits * 16)) + 2 * pair / kChunkUnits * kColumnBytes;
  }
};

}  // namespace qkv::index
