// Rows times a matrix: MLA's projection of latents to the keys or values of one head. Rows are widened once, columns of
// the matrix are packed a panel at a time, and the product of the attention kernels runs over both.
#include "cpu/targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/project_rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

// The order matters: the files below are compiled once a target.
#include "cpu/pack-inl.hpp"
#include "cpu/rows-inl.hpp"
#include "cpu/scratch.hpp"

HWY_BEFORE_NAMESPACE();
namespace qkv::cpu {
namespace HWY_NAMESPACE {
#if QKV_TARGET_HAS_VECTORS

struct ProjectScratch {
  Scratch<float> rows, panel;
};

// Rows [num_rows, depth] in f32. Up to a whole block, the last row is repeated.
template <class T>
const float* widen_rows(const ProjectTask& task, ProjectScratch& scratch) {
  const int32_t num_rows = round_up(task.num_rows, kBlockRows);
  float* rows = scratch.rows.reserve(int64_t{num_rows} * task.depth);
  for (int32_t r = 0; r < num_rows; ++r) {
    load_row_as<T>(task.rows + HWY_MIN(r, task.num_rows - 1) * task.row_stride, task.depth, 1.0F,
                   rows + int64_t{r} * task.depth);
  }
  return rows;
}

template <class T>
void project_rows_as(const ProjectTask& task) {
  static thread_local ProjectScratch scratch;
  static constexpr float kNoScales[kPanel] = {};  // those of 8-bit elements, of which there are none here
  const float* rows = widen_rows<T>(task, scratch);
  float* panel = scratch.panel.reserve(int64_t{kPanel} * task.depth);
  for (int32_t begin = 0; begin < task.num_columns; begin += kPanel) {
    const int32_t count = HWY_MIN(kPanel, task.num_columns - begin);
    const std::byte* columns[kPanel];
    for (int32_t c = 0; c < kPanel; ++c)
      columns[c] = task.matrix + (begin + HWY_MIN(c, count - 1)) * task.column_stride;
    pack_keys<T>(columns, kNoScales, kPanel, task.depth, panel);
    for (int32_t row = 0; row < task.num_rows; row += kBlockRows) {
      alignas(64) float sums[kBlockRows * kPanel];
      multiply_store<kBlockVectors>(rows + int64_t{row} * task.depth, task.depth, panel, kPanel, task.depth, sums,
                                    kPanel);
      for (int32_t r = 0; r < HWY_MIN(kBlockRows, task.num_rows - row); ++r) {
        store_row(task.dtype, sums + r * kPanel, count, OutputScale(),
                  task.out + (row + r) * task.out_stride + begin * static_cast<int64_t>(sizeof(T)));
      }
    }
  }
}

void project_rows(const ProjectTask& task) {
  if (task.dtype == DType::f32) return project_rows_as<float>(task);
  if (task.dtype == DType::f16) return project_rows_as<hwy::float16_t>(task);
  project_rows_as<hwy::bfloat16_t>(task);
}

#endif  // QKV_TARGET_HAS_VECTORS
}  // namespace HWY_NAMESPACE
}  // namespace qkv::cpu
HWY_AFTER_NAMESPACE();
