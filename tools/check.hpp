// `qkv check`: random cases against the float64 oracle.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdint>
#include <string>

#include "case_data.hpp"
#include "cases.hpp"
#include "qkv/reference.hpp"

namespace qkv::tools {

// Runs the case in all ways that must agree. Returns what is wrong, in one line, or nothing.
std::string failure_of(const Case& random_case, Device device = {});

// The first element of the case's rows in which out·out_scale or lse (if given), read on the host, is further from the
// definition than the device's rounding explains, and `further`; or a scale that the definition would not have chosen;
// or nothing.
std::string difference(const Case& c, Device device, const Tensor& out, const Tensor& lse,
                       const reference::Result& expected, const Tensor& out_scale = {}, double further = 0);

// Half a step of the dtype, relative to the number.
double rounding_of(DType dtype);

// Of an output's or a cache's dtype: the number at which a chosen scale puts the largest magnitude, and half a step
// between the smallest ones, in units of the scale.
struct StoredRange {
  double largest = INFINITY;
  double half_smallest = 0;
};
StoredRange stored_range(DType dtype);

// What a call wrote.
struct Outputs {
  OwnedTensor out;
  OwnedTensor lse;    // if it was wanted
  OwnedTensor scale;  // of `out`
};

// Which of them has other bits in a request's rows when it is alone than in the batch, whose rows `first` and following
// are the request's; or nothing.
std::string other_bits_alone(const Outputs& together, const Outputs& alone, int64_t request, int64_t first,
                             int64_t num_rows);

// What update_cache must leave of one head of a new token. With scales per token, the row's own comes first: its
// largest magnitude becomes the format's largest number.
void write_row(const CaseData& data, const LayerSpec& layer, const Tensor& source, int64_t token, int64_t slot,
               int64_t head, const Tensor& pages, OwnedTensor& scales);

// What a column's number is multiplied by; 1 where there is no scale.
double scale_at(const Tensor& out_scale, int64_t token, int64_t head, int64_t column);
// What is wrong with the scale that was chosen for the columns [begin, end) of a row, if their results are further from
// the expected ones than `absolute` and `relative` allow; or nothing. `expected`: the row.
std::string wrong_scale(double scale, DType dtype, const double* expected, int64_t begin, int64_t end, double absolute,
                        double relative);

void add_check_command(CLI::App& app);

}  // namespace qkv::tools
