// A mask printed as CUDA C++, for the kernels that evaluate it on partial tiles.
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

}  // namespace qkv::mask
