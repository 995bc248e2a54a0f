// What an item costs, for choosing between plans and for showing them: bytes, operations, seconds. An estimate: choices
// made by it change no bit. Shared by host and device planners.
#pragma once

#include <cstdint>

#include "core/index/host_device.hpp"

namespace qkv::index {

// Of one device, measured (docs/plans.md has the sources). A worker is a thread of the CPU or a multiprocessor.
struct DeviceCosts {
  int32_t num_workers = 1;
  double bytes_per_second = 1;         // of all workers together, from memory
  double worker_bytes_per_second = 1;  // of one, at most
  double few_rows_operations = 1;      // a second and worker, of the few-rows kernel
  double many_rows_operations = 1;     // of the many-rows kernel
  int32_t few_rows_tile = 1;           // rows that are computed together, whether or not there are as many
  int32_t many_rows_tile = 1;
  double item_seconds = 0;  // to start and end an item
  double step_seconds = 0;  // to start and end a forward call
  // More of it where items are shared by several requests: launches of their own, states that join through memory.
  double shared_seconds = 0;
};

// Numbers that all items of a layer have in common.
struct ItemSizes {
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t query_bytes;   // of an element
  int32_t kv_bytes;      // of an element
  int32_t output_bytes;  // of an element
};

constexpr int32_t kStateBytes = 4;  // of an element of a partial state

// Keys and values, each row's query, and its output or state. `readers` items read the keys side by side, and from
// memory once between them.
QKV_HOST_DEVICE constexpr int64_t item_bytes(const ItemSizes& sizes, int64_t rows, int64_t keys, int64_t readers,
                                             bool is_state) {
  const int64_t dims = sizes.head_dim + sizes.head_dim_v;
  const int64_t row =
      int64_t{sizes.head_dim} * sizes.query_bytes +
      (is_state ? int64_t{sizes.head_dim_v + 1} * kStateBytes : int64_t{sizes.head_dim_v} * sizes.output_bytes);
  return keys * dims * sizes.kv_bytes / readers + rows * row;
}

// Multiplications and additions of the two products, over pairs of a row and a key.
QKV_HOST_DEVICE constexpr int64_t item_operations(const ItemSizes& sizes, int64_t pairs) {
  return 2 * pairs * (sizes.head_dim + sizes.head_dim_v);
}

// Reading a state and writing the row that it enters.
QKV_HOST_DEVICE constexpr int64_t merge_bytes(const ItemSizes& sizes, int64_t rows, int64_t num_states) {
  return rows * (num_states * (sizes.head_dim_v + 1) * kStateBytes + int64_t{sizes.head_dim_v} * sizes.output_bytes);
}

// What an item asks of a device.
struct ItemCost {
  int64_t rows;
  int64_t keys;
  int64_t bytes;
  int64_t operations;
  bool few_rows;
};

// Either the memory or the arithmetic is what an item waits for. `busy_workers` share the memory.
QKV_HOST_DEVICE constexpr double item_seconds(const DeviceCosts& costs, const ItemCost& item, int32_t busy_workers) {
  const double share = costs.bytes_per_second / busy_workers;
  const double rate = share < costs.worker_bytes_per_second ? share : costs.worker_bytes_per_second;
  const double memory = static_cast<double>(item.bytes) / rate;
  const int64_t tile = item.few_rows ? costs.few_rows_tile : costs.many_rows_tile;
  const int64_t computed_rows = (item.rows + tile - 1) / tile * tile;
  const double padding = static_cast<double>(computed_rows) / static_cast<double>(item.rows);
  const double arithmetic = static_cast<double>(item.operations) * padding /
                            (item.few_rows ? costs.few_rows_operations : costs.many_rows_operations);
  return costs.item_seconds + (memory > arithmetic ? memory : arithmetic);
}

}  // namespace qkv::index
