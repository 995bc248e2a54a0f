// Shapes of the sm_90a many-rows forward kernel and where things lie in its shared memory. Pure functions of the head
// sizes and the page size: the host sizes launches and tensor maps with them, the kernel its loops, tests check them.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

struct ManyRowsShape {
  int consumers;       // warpgroups of 64 query rows each
  int tile_kv;         // keys a step
  int weight_buffers;  // 2: the product with values is waited for a step later
  int query_slots;     // 2: the next item's queries arrive while this one runs
  bool ping_pong;      // warpgroups take turns at issuing products
};

constexpr int kManyRowsStages = 2;  // of keys, and of values
constexpr int kManyRowsRowsPerConsumer = 64;
constexpr int kManyRowsFloat8Columns = 64;   // of an output of 8 bits, that four lanes store at once
constexpr int kManyRowsControlBytes = 1024;  // barriers, steps, item records
constexpr long long kManyRowsSectionBytes = 8ll << 20;

// Registers decide (232 a thread for two consumers, 160 for three): output dim_v/2, scores tile_kv/2, weights
// tile_kv/4 each, together at most registers - 28. At 64 columns softmax needs a third warpgroup to hide behind; at 256
// it is short beside the products, and turns cost more than they order.
QKV_HOST_DEVICE constexpr ManyRowsShape many_rows_shape(int head_dim, int head_dim_v) {
  if (head_dim <= 64 && head_dim_v <= 64) return {3, 128, 1, 2, true};
  if (head_dim <= 128 && head_dim_v <= 128) return {2, 128, 2, 2, true};
  if (head_dim <= 192 && head_dim_v <= 128) return {2, 128, 2, 1, true};
  return {2, 64, 2, 1, false};
}

QKV_HOST_DEVICE constexpr bool many_rows_supports(int head_dim, int head_dim_v, int page_size) {
  const bool alike = head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
  const bool heads = head_dim == head_dim_v ? alike : head_dim == 192 && head_dim_v == 128;
  return heads && page_size % 16 == 0;  // 0 = dense
}

// Tiles are blocks of as many 16-bit columns, the rows of a block one after another under the swizzle of their bytes.
QKV_HOST_DEVICE constexpr int many_rows_block_columns(int dim) { return dim % 64 == 0 ? 64 : 32; }

QKV_HOST_DEVICE constexpr int many_rows_tile_q(const ManyRowsShape& shape) {
  return shape.consumers * kManyRowsRowsPerConsumer;
}
QKV_HOST_DEVICE constexpr int many_rows_threads(const ManyRowsShape& shape) { return 128 * (shape.consumers + 1); }

// Query rows come by TMA where a warpgroup's rows are whole tokens, else they are gathered.
QKV_HOST_DEVICE constexpr bool many_rows_query_by_box(int group_size) {
  return kManyRowsRowsPerConsumer % group_size == 0;
}

// Rows of one TMA box of keys or values: the largest run that never crosses a page. Steps begin at multiples of
// tile_kv, so that the greatest common divisor serves every page size.
QKV_HOST_DEVICE constexpr int many_rows_box_rows(int page_size, int tile_kv) {
  int a = tile_kv, b = page_size;
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Column blocks that one box of keys covers: all where it holds a whole tile, else one, since keys must lie
// [block][row] over the whole tile. Values may lie [box][block][row]: a box always covers all of their blocks.
QKV_HOST_DEVICE constexpr int many_rows_key_box_blocks(int head_dim, int page_size, int tile_kv) {
  return many_rows_box_rows(page_size, tile_kv) == tile_kv ? head_dim / many_rows_block_columns(head_dim) : 1;
}

struct ManyRowsLayout {
  int query_slot_bytes, key_stage_bytes, value_stage_bytes;
  int key_begin, value_begin, control_begin, bytes;  // query slots begin at 0
};

QKV_HOST_DEVICE constexpr ManyRowsLayout many_rows_layout(const ManyRowsShape& shape, int head_dim, int head_dim_v) {
  ManyRowsLayout layout{};
  layout.query_slot_bytes = many_rows_tile_q(shape) * head_dim * 2;
  layout.key_stage_bytes = shape.tile_kv * head_dim * 2;
  layout.value_stage_bytes = shape.tile_kv * head_dim_v * 2;
  layout.key_begin = shape.query_slots * layout.query_slot_bytes;
  layout.value_begin = layout.key_begin + kManyRowsStages * layout.key_stage_bytes;
  layout.control_begin = layout.value_begin + kManyRowsStages * layout.value_stage_bytes;
  layout.bytes = layout.control_begin + kManyRowsControlBytes;
  return layout;
}

// Byte offset of a 16-byte chunk in a block under the swizzle of its row's bytes, 128 or 64 (blocks begin at multiples
// of 1024): the chunk's number is XORed with that of the 128-byte line.
QKV_HOST_DEVICE constexpr int swizzled_offset(int row, int chunk, int block_columns) {
  const int chunks = block_columns / 8;
  const int line = row * chunks / 8;
  return (row * chunks + (chunk ^ (line % chunks))) * 16;
}

// Accumulator element i of a thread of a warpgroup (64 rows): its row and column.
QKV_HOST_DEVICE constexpr int accumulator_row(int thread, int i) {
  return thread / 32 * 16 + thread % 32 / 4 + (i >> 1 & 1) * 8;
}
QKV_HOST_DEVICE constexpr int accumulator_column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + (i & 1); }

// KV heads of one request whose keys and values together stay in L2 while every query tile passes over them: the
// host lists items section by section, longest first inside a section. A power of two, so that sections are even. Head
// sizes in elements of 16 bits.
QKV_HOST_DEVICE constexpr int many_rows_heads_per_section(long long kv_len, int head_dim, int head_dim_v,
                                                          int num_kv_heads) {
  int heads = 1;
  while (heads < num_kv_heads && 2ll * heads * kv_len * (head_dim + head_dim_v) * 2 <= kManyRowsSectionBytes)
    heads *= 2;
  return heads;
}

}  // namespace qkv::index
