// NVIDIA's matrix library, opened when first needed. What we use of it is declared here; values are facts of cuBLAS 12
// and 13.
#pragma once

#include <string>

#include "jit/cuda_api.hpp"
#include "jit/library.hpp"

struct cublasContext;

namespace qkv::cuda {

using cublasHandle_t = ::cublasContext*;
using cublasStatus_t = int;

inline constexpr cublasStatus_t kCublasSuccess = 0;
inline constexpr int kCublasNoTranspose = 0;
inline constexpr int kCublasTranspose = 1;
inline constexpr int kCudaF16 = 2;    // CUDA_R_16F
inline constexpr int kCudaBf16 = 14;  // CUDA_R_16BF
inline constexpr int kCublasComputeF32 = 68;
inline constexpr int kCublasGemmDefault = -1;

struct Cublas {
  std::string path;

  cublasStatus_t (*create)(cublasHandle_t*);
  cublasStatus_t (*destroy)(cublasHandle_t);
  cublasStatus_t (*set_stream)(cublasHandle_t, jit::CUstream);
  // Column-major, for i < batch_count: c + i·stride_c = alpha·op(a + i·stride_a)·op(b + i·stride_b) + beta·c.
  cublasStatus_t (*gemm_strided_batched)(cublasHandle_t, int operation_a, int operation_b, int m, int n, int k,
                                         const void* alpha, const void* a, int type_a, int lda, long long stride_a,
                                         const void* b, int type_b, int ldb, long long stride_b, const void* beta,
                                         void* c, int type_c, int ldc, long long stride_c, int batch_count,
                                         int compute_type, int algorithm);
};

// Throws unavailable: where it was looked for, and what to install. The places are NVRTC's.
const Cublas& cublas();

}  // namespace qkv::cuda
