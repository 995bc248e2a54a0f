// Shapes of the sm_90a many-rows kernel for 8-bit queries, keys and values, and how it turns values round: products of
// 8-bit floats want both operands with k running fastest, and values come with their columns running fastest. Pure
// functions of the head sizes: the host sizes launches with them, the kernel its loops, tests check them.
#pragma once

#include "core/index/forward_sm90_many_rows_shape.hpp"

namespace qkv::index {

// A row's 8-bit elements are laid out as half as many 16-bit ones: blocks, boxes and swizzles are those of the 16-bit
// kernel.
QKV_HOST_DEVICE constexpr int many_rows_f8_units(int dim) { return dim / 2; }

// Of turned values. A stage is free when the last warpgroup is done with it, part of a step behind the first one, and
// takes most of a step to fill: with two, three warpgroups would wait for it.
QKV_HOST_DEVICE constexpr int many_rows_f8_turned_stages(int head_dim_v) { return head_dim_v <= 128 ? 4 : 2; }

// Registers decide (152 a thread for three consumers, 232 for two): output dim_v/2, scores tile_kv/2, whose registers
// products with as many columns of values take, those of smaller products, weights tile_kv/8 where they stay in
// registers: together at most registers - 24. Layers whose rows keep more in hand have no room for the third. Two
// consumers take turns at products; three fill each other's waits without.
QKV_HOST_DEVICE constexpr ManyRowsShape many_rows_f8_shape(int head_dim, int head_dim_v, bool keeps_more) {
  if (head_dim > 128 || head_dim_v > 128) return {2, 128, 1, 1, true};
  return keeps_more ? ManyRowsShape{2, 128, 1, 2, true} : ManyRowsShape{3, 128, 1, 2, false};
}

// Of the output: a product with values is added to it chunk by chunk.
QKV_HOST_DEVICE constexpr int many_rows_f8_chunk_columns(int head_dim_v) {
  return head_dim_v <= 128 ? head_dim_v : 128;
}

// Where shared memory has no room for them, nor time: products would read them once a chunk.
QKV_HOST_DEVICE constexpr bool many_rows_f8_weights_in_registers(int head_dim_v) { return head_dim_v > 128; }

QKV_HOST_DEVICE constexpr bool many_rows_f8_supports(int head_dim, int head_dim_v, int page_size) {
  const bool is_tuned = head_dim == 64 || head_dim == 128 || head_dim == 256;
  return is_tuned && head_dim == head_dim_v && page_size % 16 == 0;
}

// query slots, key stages, stages of values as they came, stages of values turned round: [column][key], weights:
// [row][place].
struct ManyRowsF8Layout {
  int query_slot_bytes, key_stage_bytes, value_stage_bytes;
  int key_begin, loaded_value_begin, value_begin, weight_begin, control_begin, bytes;  // query slots begin at 0
};

QKV_HOST_DEVICE constexpr ManyRowsF8Layout many_rows_f8_layout(const ManyRowsShape& shape, int head_dim,
                                                               int head_dim_v) {
  ManyRowsF8Layout layout{};
  layout.query_slot_bytes = many_rows_tile_q(shape) * head_dim;
  layout.key_stage_bytes = shape.tile_kv * head_dim;
  layout.value_stage_bytes = shape.tile_kv * head_dim_v;
  layout.key_begin = shape.query_slots * layout.query_slot_bytes;
  layout.loaded_value_begin = layout.key_begin + kManyRowsStages * layout.key_stage_bytes;
  layout.value_begin = layout.loaded_value_begin + kManyRowsStages * layout.value_stage_bytes;
  layout.weight_begin = layout.value_begin + many_rows_f8_turned_stages(head_dim_v) * layout.value_stage_bytes;
  const int weight_bytes = many_rows_f8_weights_in_registers(head_dim_v) ? 0 : many_rows_tile_q(shape) * shape.tile_kv;
  layout.control_begin = layout.weight_begin + weight_bytes;
  layout.bytes = layout.control_begin + kManyRowsControlBytes;
  return layout;
}

// A thread of a quad holds the scores of keys 2q, 2q + 1, 2q + 8 and 2q + 9 of every sixteen, but as an operand the
// weights at places 4q to 4q + 3. So the weights' place p stands for this key, and values are put in the same order.
QKV_HOST_DEVICE constexpr int key_of_place(int place) {
  const int group = place & ~15, quad = place >> 2 & 3, in_quad = place & 3;
  return group + (in_quad >> 1) * 8 + quad * 2 + (in_quad & 1);
}

// Where the places 16·group … of a column lie in a stage of turned values: a row a column.
QKV_HOST_DEVICE constexpr int turned_value_offset(int column, int group, int tile_kv) {
  return swizzled_offset(column, group, many_rows_f8_units(tile_kv));
}

// Where the places 16·group … of a row lie in a warpgroup's weights.
QKV_HOST_DEVICE constexpr int weight_offset(int row, int group, int tile_kv) {
  return swizzled_offset(row, group, many_rows_f8_units(tile_kv));
}

// A warp turns 32 keys x 16 columns at once: ldmatrix.trans of four matrices of 8 keys, stmatrix of four matrices of 8
// columns x 16 places. Row r of matrix i that is stored is this column of the 16. Even and odd columns of a lane go to
// matrices 2h and 2h + 1, changed over in the upper half: the rows of a matrix are then 8 different ones mod 8, which
// the swizzle spreads over all banks.
QKV_HOST_DEVICE constexpr int turned_column(int matrix, int row) {
  return 2 * row + ((row >= 4 ? 1 : 0) ^ (matrix & 1));
}
// A lane's place in the first 32 keys and 16 columns that its warp turns tells the others, of `keys` and `columns`
// further on: they differ in what is added, and in what swizzles exclusive-or. Places may be addresses, since stages
// begin at multiples of 1024; keys: multiples of 32; columns: multiples of 32, from the first or the second 16 on.
QKV_HOST_DEVICE constexpr unsigned further_loaded_chunk(unsigned place, int keys, int columns, int box_rows, int dim) {
  const int block_columns = 2 * many_rows_block_columns(many_rows_f8_units(dim));
  return (place ^ columns % block_columns) +
         loaded_chunk_offset(keys, columns / block_columns * block_columns / 16, box_rows, dim);
}
QKV_HOST_DEVICE constexpr unsigned further_turned_value(unsigned place, int keys, int columns, int tile_kv) {
  return (place ^ keys) + columns * tile_kv;
}

// Of the bytes of two loaded matrices' registers (low and high eight keys), those of the column that matrix i takes
// from the lanes that hold its row: the selector of prmt.
QKV_HOST_DEVICE constexpr unsigned turned_bytes(int matrix, int row) {
  return (turned_column(matrix, row) & 1) != 0 ? 0x7531u : 0x6420u;
}

}  // namespace qkv::index
