// A mask printed as CUDA C++, for the kernels that evaluate it on partial tiles and on parts of them.
#pragma once

#include <string>

#include "mask/program.hpp"

namespace qkv::mask {

// The text of
//     __device__ __forceinline__ bool visible(const MaskContext& m, int q_pos, int kv_pos, int q_head, int query)
// where MaskContext has request, q_len, kv_len and operand[i], which points at the request's own values as in
// ProgramInput. Called with 0 <= query < q_len and 0 <= kv_pos < kv_len only. Arithmetic is int where intervals prove
// that exact, else long long. Equal programs give equal text.
std::string emit_cuda(const Program& program);

// The text of
//     __device__ __forceinline__ TileClass classify(const MaskContext& m, int q_low, int q_high, int kv_low,
//                                                   int kv_high)
// for the queries at positions [q_low, q_high] and the keys [kv_low, kv_high]: empty and full are proofs by interval
// arithmetic, as those of mask::classify. Reads operands of whole requests only: those of single queries and keys, and
// heads, may be anything. TileClass is {empty, partial, full}.
std::string emit_tile_class_cuda(const Program& program);

}  // namespace qkv::mask
