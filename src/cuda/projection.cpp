#include "cuda/projection.hpp"

#include <map>
#include <mutex>

#include "core/checks.hpp"
#include "cuda/cublas.hpp"
#include "cuda/memory.hpp"

namespace qkv::cuda {
namespace {

void check(cublasStatus_t status, const char* call) {
  if (status == kCublasSuccess) return;
  refuse(call, fmt::format("cuBLAS status {}", status), "status 0", ErrorCode::internal);
}

// Elements from row to row, for cuBLAS, which refuses less than a row. The stride of an axis of size 1 says nothing.
int leading(const Tensor& rows) {
  return static_cast<int>(rows.shape[0] == 1 ? rows.shape[rows.rank - 1] : rows.stride[0]);
}

// cuBLAS's handle of a device. It holds a stream and a workspace, so calls take turns.
class Handle {
 public:
  explicit Handle(int32_t device_index) : device_index_(device_index) {
    const CurrentDevice current(device_index);
    check(cublas().create(&handle_), "cublasCreate");
  }
  ~Handle() {
    const CurrentDevice current(device_index_);
    cublas().destroy(handle_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // out[token, head, :] = weights of the head · latents[token]
  void multiply(const plan::ProjectionMatrix& matrix, int64_t first_column, const Tensor& latents, const Tensor& out,
                jit::CUstream stream) {
    const float one = 1;
    const float zero = 0;
    const int type = matrix.weights.dtype == DType::bf16 ? kCudaBf16 : kCudaF16;
    const auto* weights = static_cast<const std::byte*>(matrix.weights.data) +
                          first_column * matrix.weights.stride[0] * size_bytes(matrix.weights.dtype);
    const std::lock_guard lock(mutex_);
    check(cublas().set_stream(handle_, stream), "cublasSetStream");
    // Row-major tensors are column-major matrices turned over: heads are the batch, latents are shared by all of them.
    check(cublas().gemm_strided_batched(handle_, kCublasTranspose, kCublasNoTranspose, static_cast<int>(out.shape[2]),
                                        static_cast<int>(out.shape[0]), static_cast<int>(matrix.depth()), &one, weights,
                                        type, static_cast<int>(matrix.weights.stride[0]),
                                        matrix.weights.stride[0] * (matrix.key_dim + matrix.value_dim), latents.data,
                                        type, leading(latents), 0, &zero, out.data, type, leading(out), out.stride[1],
                                        matrix.num_heads, kCublasComputeF32, kCublasGemmDefault),
          "cublasGemmStridedBatchedEx");
  }

 private:
  int32_t device_index_;
  cublasHandle_t handle_ = nullptr;
  std::mutex mutex_;
};

class CublasProjector final : public plan::Projector {
 public:
  CublasProjector(const plan::ProjectionMatrix& matrix, int32_t device_index)
      : matrix_(matrix), device_index_(device_index), handle_(handle_of(device_index)) {}

  void project(const plan::ProjectionTensors& tensors, Stream stream) const override {
    const CurrentDevice current(device_index_);
    const auto on = static_cast<jit::CUstream>(stream.handle);
    handle_->multiply(matrix_, 0, tensors.latents, tensors.key, on);
    handle_->multiply(matrix_, matrix_.key_dim, tensors.latents, tensors.value, on);
  }

 private:
  // One a device for all projectors that live: a workspace of many megabytes hangs on each.
  static std::shared_ptr<Handle> handle_of(int32_t device_index) {
    static std::mutex mutex;
    static std::map<int32_t, std::weak_ptr<Handle>> handles;
    const std::lock_guard lock(mutex);
    std::shared_ptr<Handle> handle = handles[device_index].lock();
    if (!handle) {
      handle = std::make_shared<Handle>(device_index);
      handles[device_index] = handle;
    }
    return handle;
  }

  plan::ProjectionMatrix matrix_;
  int32_t device_index_;
  std::shared_ptr<Handle> handle_;
};

}  // namespace

std::unique_ptr<plan::Projector> make_projector(const plan::ProjectionMatrix& matrix, int32_t device_index) {
  if (matrix.weights.dtype == DType::f32) {
    refuse("kv_b_proj", to_string(matrix.weights.dtype), "bf16 or f16 on a GPU", ErrorCode::unsupported);
  }
  return std::make_unique<CublasProjector>(matrix, device_index);
}

}  // namespace qkv::cuda
