// What the machine can do, measured beside the cases: the matrix rate of a BLAS and the bandwidth of plain loops.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/support/report.hpp"

namespace qkv::bench {

// OpenBLAS SGEMM of 2048^3 on the threads of num_threads(), in GFLOP. Absent without OpenBLAS.
std::vector<Contestant> sgemm_limit();

// Reads `bytes` once, in GB.
Contestant read_limit(int64_t bytes);

// Copies `bytes` once, counted as read and written, in GB.
Contestant copy_limit(int64_t bytes);

// The three steps without fusion: SGEMM, softmax in place, SGEMM, a head at a time. query, key, value and out are
// f32 [tokens, heads, dim]. In GFLOP as given. Absent without OpenBLAS.
std::vector<Contestant> naive_attention(int32_t tokens, int32_t num_q_heads, int32_t num_kv_heads, int32_t dim,
                                        bool causal, double gflop);

}  // namespace qkv::bench
