#include "parallel/rows.hpp"

#include <algorithm>
#include <cstring>

namespace qkv::parallel {
namespace {

class CpuRowMover : public RowMover {
 public:
  void prepare(Stream) override {}
  void gather(const Rows& rows, std::byte* receive, int64_t row_bytes, Stream) override {
    const auto bytes = static_cast<size_t>(row_bytes);
    for (size_t i = 0; i < rows.size(); ++i) std::memcpy(receive + i * bytes, rows[i], bytes);
  }
  void sum(const Rows& rows, float* receive, int64_t row_elements, Stream) override {
    sum_rows(rows, receive, row_elements);
  }
  void release(Stream) override {}
};

}  // namespace

void sum_rows(const Rows& rows, float* sum, int64_t row_elements) {
  const auto row = [&](size_t i) { return reinterpret_cast<const float*>(rows[i]); };
  std::copy_n(row(0), row_elements, sum);
  for (size_t i = 1; i < rows.size(); ++i) {
    const float* values = row(i);
    for (int64_t e = 0; e < row_elements; ++e) sum[e] += values[e];
  }
}

std::unique_ptr<RowMover> cpu_row_mover() { return std::make_unique<CpuRowMover>(); }

}  // namespace qkv::parallel
