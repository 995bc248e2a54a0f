// Tiles, threads and shared memory of the sm_80 forward kernel: what the host launches and the kernel is compiled for.
// Included by host and device code.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

// Shared memory holds the query tile and two stages of key and value tiles. Rows are an odd number of 16-byte chunks
// apart, so that the eight rows of an ldmatrix fall into different banks whatever the head size.
struct ForwardSm80Shape {
  int head_dim;
  int head_dim_v;
  int tile_q;            // 16, 32, 64 or 128
  int tile_kv;           // 16, 32 or 64
  bool is_8bit = false;  // keys and values come as bytes, and are widened into one tile of 16-bit rows before each use

  static constexpr int kMinWarps = 4;
  static constexpr int kMaxColumns = 256;  // of the output that the registers of a warp hold
  static constexpr int kStages = 2;

  QKV_HOST_DEVICE static constexpr int padded(int dim) { return (dim + 15) / 16 * 16; }
  QKV_HOST_DEVICE static constexpr int row_bytes(int dim) { return (padded(dim) / 8 | 1) * 16; }

  // Output columns of one pass over the keys; further passes compute the scores again.
  QKV_HOST_DEVICE constexpr int columns() const {
    const int passes = (head_dim_v + kMaxColumns - 1) / kMaxColumns;
    return passes == 1 ? head_dim_v : padded((head_dim_v + passes - 1) / passes);
  }
  // m16 tiles of a warp's rows: two share each fragment of keys and values that is read.
  QKV_HOST_DEVICE constexpr int row_tiles() const { return tile_q >= 128 ? 2 : 1; }
  QKV_HOST_DEVICE constexpr int warps_q() const { return tile_q / (16 * row_tiles()); }
  // Few rows leave warps over: they share the keys of a tile, 16 at least each.
  QKV_HOST_DEVICE constexpr int warps_kv() const {
    const int wanted = warps_q() >= kMinWarps ? 1 : kMinWarps / warps_q();
    return wanted < tile_kv / 16 ? wanted : tile_kv / 16;
  }
  QKV_HOST_DEVICE constexpr int num_threads() const { return 32 * warps_q() * warps_kv(); }

  QKV_HOST_DEVICE constexpr int query_bytes() const { return tile_q * row_bytes(head_dim); }
  QKV_HOST_DEVICE constexpr int key_tile_bytes() const { return tile_kv * row_bytes(head_dim); }
  QKV_HOST_DEVICE constexpr int value_tile_bytes() const { return tile_kv * row_bytes(columns()); }
  QKV_HOST_DEVICE constexpr int key_stage_bytes() const { return is_8bit ? tile_kv * head_dim : key_tile_bytes(); }
  QKV_HOST_DEVICE constexpr int value_stage_bytes() const { return is_8bit ? tile_kv * columns() : value_tile_bytes(); }
  // A stage's scales, an f32 a key and an f32 a value.
  QKV_HOST_DEVICE constexpr int scale_stage_bytes() const { return is_8bit ? tile_kv * 8 : 0; }
  QKV_HOST_DEVICE constexpr int smem_bytes() const {
    const int widened = is_8bit ? key_tile_bytes() + value_tile_bytes() : 0;
    return query_bytes() + widened + kStages * (key_stage_bytes() + value_stage_bytes() + scale_stage_bytes());
  }
};

// The tiles for many rows, where a CTA has at most `smem_limit` bytes (232448 on sm_90, 166912 on sm_80, 101376 on
// sm_86 and sm_89): the largest of which two CTAs share an SM, else the largest that fit; {16, 16} always do. Beyond
// 128 output columns the registers hold only one m16 tile of rows. Kernels for few rows take tile_q 16 and this
// tile_kv. 8-bit keys and values take less memory than 16-bit ones, and the same tiles.
QKV_HOST_DEVICE constexpr ForwardSm80Shape forward_sm80_shape(int head_dim, int head_dim_v, int smem_limit) {
  constexpr int kTiles[][2] = {{128, 64}, {128, 32}, {64, 64}, {64, 32}, {32, 32}, {32, 16}};
  constexpr int kReservedBytes = 1024;  // a CTA, by the system; an SM has this much more than a CTA may use
  for (int num_ctas = 2; num_ctas >= 1; --num_ctas) {
    for (const auto& tile : kTiles) {
      const ForwardSm80Shape shape{head_dim, head_dim_v, tile[0], tile[1]};
      if (shape.row_tiles() == 2 && shape.columns() > 128) continue;
      if (num_ctas == 2 && shape.tile_q < 64) break;
      if (num_ctas * (shape.smem_bytes() + kReservedBytes) <= smem_limit + kReservedBytes) return shape;
    }
  }
  return {head_dim, head_dim_v, 16, 16};
}

QKV_HOST_DEVICE constexpr int forward_sm80_tile_kv(int head_dim, int head_dim_v, int smem_limit) {
  return forward_sm80_shape(head_dim, head_dim_v, smem_limit).tile_kv;
}

}  // namespace qkv::index
