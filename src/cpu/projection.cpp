#include "cpu/projection.hpp"

#include <algorithm>

#include "core/float16.hpp"
#include "cpu/kernels.hpp"
#include "cpu/threads.hpp"

namespace qkv::cpu {
namespace {

// Packing a head's part of the matrix costs as much as some ten rows: enough rows to pay for it, few enough for a
// core's cache.
constexpr int64_t kRowsPerTask = 192;

int64_t bytes(const Tensor& tensor, int64_t elements) { return elements * size_bytes(tensor.dtype); }

// Rows [begin, end) of the keys or of the values of one head. first_column: in the head's part of the matrix.
ProjectTask task_of(const plan::ProjectionMatrix& matrix, const Tensor& latents, const Tensor& out, int64_t begin,
                    int64_t end, int64_t head, int64_t first_column) {
  const Tensor& weights = matrix.weights;
  const int64_t column = head * (matrix.key_dim + matrix.value_dim) + first_column;
  ProjectTask task;
  task.dtype = weights.dtype;
  task.num_rows = static_cast<int32_t>(end - begin);
  task.depth = static_cast<int32_t>(matrix.depth());
  task.num_columns = static_cast<int32_t>(out.shape[2]);
  task.rows = static_cast<const std::byte*>(latents.data) + bytes(latents, begin * latents.stride[0]);
  task.row_stride = bytes(latents, latents.stride[0]);
  task.matrix = static_cast<const std::byte*>(weights.data) + bytes(weights, column * weights.stride[0]);
  task.column_stride = bytes(weights, weights.stride[0]);
  task.out = static_cast<std::byte*>(out.data) + bytes(out, begin * out.stride[0] + head * out.stride[1]);
  task.out_stride = bytes(out, out.stride[0]);
  return task;
}

}  // namespace

void project(const plan::ProjectionMatrix& matrix, const plan::ProjectionTensors& tensors) {
  const ProjectKernel project_rows = forward_kernels().project_rows;
  const int64_t num_rows = tensors.latents.shape[0];
  const int64_t num_blocks = (num_rows + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t work = num_rows * matrix.depth() * matrix.weights.shape[0];
  parallel_for(num_blocks * matrix.num_heads, work, [&](int64_t i) {
    const int64_t begin = i / matrix.num_heads * kRowsPerTask;
    const int64_t end = std::min(num_rows, begin + kRowsPerTask);
    const int64_t head = i % matrix.num_heads;
    project_rows(task_of(matrix, tensors.latents, tensors.key, begin, end, head, 0));
    project_rows(task_of(matrix, tensors.latents, tensors.value, begin, end, head, matrix.key_dim));
  });
}

void project_plain(const ProjectTask& task) {
  const int64_t element = size_bytes(task.dtype);
  for (int64_t r = 0; r < task.num_rows; ++r) {
    for (int64_t c = 0; c < task.num_columns; ++c) {
      float sum = 0;
      for (int64_t i = 0; i < task.depth; ++i) {
        sum += load_f32(task.rows + r * task.row_stride + i * element, task.dtype) *
               load_f32(task.matrix + c * task.column_stride + i * element, task.dtype);
      }
      store_f32(task.out + r * task.out_stride + c * element, task.dtype, sum);
    }
  }
}

}  // namespace qkv::cpu
