// How many multiprocessors of a Hopper GPU a batch's few-rows items get while its many-rows items run on the others.
// Decode waits for memory, prefill for the matrix units: side by side they take less time than one after the other.
#pragma once

#include <cstdint>

#include "core/index/host_device.hpp"

namespace qkv::index {

// Operations in the time of one byte from memory, on the whole GPU: 650 TFLOP/s over 4.5 TB/s, as the kernels run.
constexpr int64_t kOperationsPerByte = 144;
// A multiprocessor that few others compete with takes so many times its even share of the memory's bandwidth.
constexpr int64_t kBandwidthGain = 2;

// The share with which both end at the same time: few/(gain·n) = many/(all - n).
QKV_HOST_DEVICE constexpr int32_t few_rows_multiprocessors(int64_t few_rows_bytes, int64_t many_rows_operations,
                                                           int32_t num_multiprocessors) {
  const int64_t many = many_rows_operations / kOperationsPerByte;
  if (few_rows_bytes == 0 || many == 0) return 0;
  const int64_t share = num_multiprocessors * few_rows_bytes / (few_rows_bytes + kBandwidthGain * many);
  return static_cast<int32_t>(share < num_multiprocessors ? share : num_multiprocessors - 1);
}

}  // namespace qkv::index
