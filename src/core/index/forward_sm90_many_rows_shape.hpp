// Shapes of the sm_90a many-rows forward kernel and where things lie in its shared memory. Pure functions of the head
// sizes and the page size: the host sizes launches and tensor maps with them, the kernel its loops, tests check them.
#pragma once

#include "core/index/host_device.hpp"

namespace qkv::index {

struct ManyRowsShape {
  int consumers;          // warpgroups of 64 query rows each
  int tile_kv;            // keys a step
  int weight_buffers;     // 2: the product with values is waited for a step later
  int query_slots;        // 2: the next item's queries arrive while this one runs
  bool ping_pong;         // warpgroups take turns at issuing products
  int loaded_stages = 0;  // of 8-bit keys, and of values, that a warpgroup of its own widens; 0: they come as 16 bits
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

// Of 16-bit queries with 8-bit keys and values. The widening warpgroup leaves consumers 224 registers, which is room
// for the same matrices, but not for a third consumer; four warpgroups begin with 128, fewer than ptxas asks for where
// a product has 256 columns. Loaded bytes take the room of the second query slot.
QKV_HOST_DEVICE constexpr ManyRowsShape many_rows_widening_shape() { return {2, 128, 2, 1, true, 2}; }

QKV_HOST_DEVICE constexpr bool many_rows_supports(int head_dim, int head_dim_v, int page_size) {
  const bool alike = head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
  const bool heads = head_dim == head_dim_v ? alike : head_dim == 192 && head_dim_v == 128;
  return heads && page_size % 16 == 0;  // 0 = dense
}

QKV_HOST_DEVICE constexpr bool many_rows_widening_supports(int head_dim, int head_dim_v, int page_size) {
  const bool heads = head_dim == head_dim_v && (head_dim == 64 || head_dim == 128);
  return heads && page_size % 16 == 0;
}

// Tiles are blocks of as many 16-bit columns, the rows of a block one after another under the swizzle of their bytes.
QKV_HOST_DEVICE constexpr int many_rows_block_columns(int dim) { return dim % 64 == 0 ? 64 : 32; }

QKV_HOST_DEVICE constexpr int many_rows_tile_q(const ManyRowsShape& shape) {
  return shape.consumers * kManyRowsRowsPerConsumer;
}
QKV_HOST_DEVICE constexpr int many_rows_threads(const ManyRowsShape& shape) {
  return 128 * (shape.consumers + (shape.loaded_stages > 0 ? 2 : 1));
}

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
  int loaded_key_stage_bytes, loaded_value_stage_bytes;  // of 8 bits, where those are widened
  int key_begin, value_begin, loaded_key_begin, loaded_value_begin, control_begin;  // query slots begin at 0
  int token_scales_begin;  // [stage][keys, values][tile_kv] f32, where bytes are widened
  int bytes;
};

QKV_HOST_DEVICE constexpr ManyRowsLayout many_rows_layout(const ManyRowsShape& shape, int head_dim, int head_dim_v) {
  ManyRowsLayout layout{};
  layout.query_slot_bytes = many_rows_tile_q(shape) * head_dim * 2;
  layout.key_stage_bytes = shape.tile_kv * head_dim * 2;
  layout.value_stage_bytes = shape.tile_kv * head_dim_v * 2;
  layout.key_begin = shape.query_slots * layout.query_slot_bytes;
  layout.value_begin = layout.key_begin + kManyRowsStages * layout.key_stage_bytes;
  layout.loaded_key_stage_bytes = shape.tile_kv * head_dim;
  layout.loaded_value_stage_bytes = shape.tile_kv * head_dim_v;
  layout.loaded_key_begin = layout.value_begin + kManyRowsStages * layout.value_stage_bytes;
  layout.loaded_value_begin = layout.loaded_key_begin + shape.loaded_stages * layout.loaded_key_stage_bytes;
  layout.control_begin = layout.loaded_value_begin + shape.loaded_stages * layout.loaded_value_stage_bytes;
  layout.token_scales_begin = layout.control_begin + kManyRowsControlBytes;
  const int scales = shape.loaded_stages > 0 ? kManyRowsStages * 2 * shape.tile_kv : 0;
  layout.bytes = layout.token_scales_begin + scales * 4;
  return layout;
}

// Byte offset of a 16-byte chunk in a block under the swizzle of its row's bytes, 128 or 64 (blocks begin at multiples
// of 1024): the chunk's number is XORed with that of the 128-byte line.
QKV_HOST_DEVICE constexpr int swizzled_offset(int row, int chunk, int block_columns) {
  const int chunks = block_columns / 8;
  const int line = row * chunks / 8;
  return (row * chunks + (chunk ^ (line % chunks))) * 16;
}

// Where 16 columns of a key lie in a stage of loaded 8-bit rows: [box][block][row] under the swizzle of a block's rows,
// which has half as many units of 16 bits as columns.
QKV_HOST_DEVICE constexpr int loaded_chunk_offset(int key, int chunk, int box_rows, int dim) {
  const int block_columns = many_rows_block_columns(dim / 2);
  const int block_chunks = block_columns / 8;
  const int row = key % box_rows;
  return key / box_rows * box_rows * dim + chunk / block_chunks * (box_rows * block_columns * 2) +
         swizzled_offset(row, chunk % block_chunks, block_columns);
}

// Where the first 8 of these columns lie once they are 16 bits, [block][row]; the other 8 lie at that offset ^ 16.
QKV_HOST_DEVICE constexpr int widened_chunk_offset(int key, int chunk, int tile_kv) {
  return chunk / 4 * (tile_kv * 128) + swizzled_offset(key, chunk % 4 * 2, 64);
}

// The 16 columns that thread `thread` of 128 widens first; then those of keys widening_step_keys further, until the
// tile is done. Eight neighbouring threads, whose accesses of shared memory go together, meet every bank once: four of
// them have one row of a block, four the next row, of which the swizzle makes even chunks odd.
struct WideningPlace {
  int key, chunk;
};
QKV_HOST_DEVICE constexpr WideningPlace widening_place(int thread, int dim) {
  if (dim == 64) return {thread / 4, thread % 4};
  const int blocks = dim / 128, pair = thread / 16;
  return {pair / blocks * 2 + ((thread / 8 ^ thread / 4) & 1), pair % blocks * 8 + thread % 8};
}
QKV_HOST_DEVICE constexpr int widening_step_keys(int dim) { return 128 * 16 / dim; }

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
