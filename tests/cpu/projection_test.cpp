// The projection of every instruction set against sums in float64.
#include "cpu/projection.hpp"

#include "cpu/kernels.hpp"
#include "support/small_layer.hpp"

namespace qkv::cpu {
namespace {

struct Product {
  Product(DType dtype, int32_t num_rows, int32_t depth, int32_t num_columns)
      : rows(dtype, {num_rows, depth}, {depth + 3, 1}, int64_t{num_rows} * (depth + 3)),
        matrix(dtype, {num_columns, depth}, {depth + 5, 1}, int64_t{num_columns} * (depth + 5)),
        out(dtype, {num_rows, num_columns}, {num_columns + 7, 1}, int64_t{num_rows} * (num_columns + 7)) {
    tools::Draw draw(5, num_rows * 1000 + depth + num_columns);
    for (const Tensor& tensor : {rows.view(), matrix.view()}) {
      for (int64_t r = 0; r < tensor.shape[0]; ++r) {
        for (int64_t i = 0; i < depth; ++i) tools::store(tensor, {r, i}, draw.normal());
      }
    }
  }

  ProjectTask task() {
    const Tensor a = rows.view();
    const Tensor b = matrix.view();
    const Tensor c = out.view();
    ProjectTask task;
    task.dtype = a.dtype;
    task.num_rows = static_cast<int32_t>(a.shape[0]);
    task.depth = static_cast<int32_t>(a.shape[1]);
    task.num_columns = static_cast<int32_t>(b.shape[0]);
    task.rows = static_cast<const std::byte*>(a.data);
    task.row_stride = a.stride[0] * size_bytes(a.dtype);
    task.matrix = static_cast<const std::byte*>(b.data);
    task.column_stride = b.stride[0] * size_bytes(b.dtype);
    task.out = static_cast<std::byte*>(c.data);
    task.out_stride = c.stride[0] * size_bytes(c.dtype);
    return task;
  }

  void expect_right(std::string_view instruction_set) {
    const DType dtype = rows.view().dtype;
    const double relative = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 1e-6;
    for (int64_t r = 0; r < rows.view().shape[0]; ++r) {
      for (int64_t c = 0; c < matrix.view().shape[0]; ++c) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t i = 0; i < rows.view().shape[1]; ++i) {
          const double term = double{tools::load(rows.view(), {r, i})} * double{tools::load(matrix.view(), {c, i})};
          sum += term;
          magnitude += std::fabs(term);
        }
        const double difference = std::fabs(tools::load(out.view(), {r, c}) - sum);
        ASSERT_TRUE(difference <= relative * std::fabs(sum) + 1e-6 * magnitude)
            << instruction_set << " " << to_string(dtype) << " [" << r << ", " << c << "]: " << difference;
      }
    }
    EXPECT_TRUE(out.buffer().guards_intact());
  }

  tools::OwnedTensor rows, matrix, out;
};

TEST(projection, every_instruction_set_agrees_with_float64) {
  for (const ForwardKernels& kernels : all_forward_kernels()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const auto& [num_rows, depth, num_columns] :
           {std::tuple{1, 8, 1}, {5, 512, 128}, {6, 513, 33}, {7, 40, 64}, {200, 16, 65}, {13, 700, 16}}) {
        Product product(dtype, num_rows, depth, num_columns);
        kernels.project_rows(product.task());
        product.expect_right(kernels.name);
      }
    }
  }
}

TEST(projection, bits_of_a_row_do_not_depend_on_the_rows_beside_it) {
  for (const ForwardKernels& kernels : all_forward_kernels()) {
    Product together(DType::bf16, 13, 96, 40);
    kernels.project_rows(together.task());
    for (int32_t r = 0; r < 13; ++r) {
      Product alone(DType::bf16, 13, 96, 40);
      ProjectTask task = alone.task();
      task.num_rows = 1;
      task.rows += r * task.row_stride;
      task.out += r * task.out_stride;
      kernels.project_rows(task);
      for (int64_t c = 0; c < 40; ++c) {
        ASSERT_EQ(tools::load(alone.out.view(), {r, c}), tools::load(together.out.view(), {r, c})) << kernels.name;
      }
    }
  }
}

}  // namespace
}  // namespace qkv::cpu
