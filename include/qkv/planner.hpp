// Plans in memory that is made once: for steps that are captured in a CUDA graph and replayed with other batches.
#pragma once

#include <cstdint>
#include <memory>

#include "qkv/batch.hpp"
#include "qkv/device.hpp"
#include "qkv/export.hpp"
#include "qkv/layer.hpp"
#include "qkv/plan.hpp"

namespace qkv {

namespace plan {
class LayerEngine;
}

// The largest batch of a planner. Launches and buffers are sized by it: a graph of decode steps is smaller and sooner
// done with max_query_len 1.
struct PlanLimits {
  int32_t max_requests = 0;   // padding included
  int64_t max_tokens = 0;     // new tokens of a batch
  int32_t max_query_len = 0;  // new tokens of a request; 0 = max_tokens
  int32_t max_seq_len = 0;    // keys of a request
  int64_t max_keys = 0;       // keys of a batch; 0 = max_requests·max_seq_len
  int32_t num_pages = 0;      // of the cache, for layers with one: pages and slots of a batch lie in it
  // Batches may come as arrays on the device, see Planner::plan. For GPUs, and masks that neither name heads nor have
  // operands of single tokens.
  bool plans_on_device = false;
};

// Its plans are read by the same launches at the same addresses: capture update_cache and forward with any plan of it,
// then call plan() and replay, step after step. Tensors handed over with its plans have the rows of the largest batch.
// One thread at a time.
class QKV_EXPORT Planner {
 public:
  // Attention::planner.
  Planner(const LayerSpec& layer, Device device, std::shared_ptr<const plan::LayerEngine> engine,
          const PlanLimits& limits, const Tensor& workspace);
  ~Planner();
  Planner(Planner&&) noexcept;
  Planner& operator=(Planner&&) noexcept;

  // With 0 replaced by what it stands for.
  const PlanLimits& limits() const;

  // Brings the batch into the planner's memory, in place of the batch before, whose plan is refused from now on. On a
  // GPU: no allocation and no wait for the device; the work that reads the plan runs behind it on this stream, and what
  // has been launched there before still sees the old one. Not while the stream is captured.
  //
  // With limits.plans_on_device, all of the batch's arrays may lie on the device instead: a kernel reads them when
  // it runs, and nothing need be known on the host. Captured in front of update_cache and forward, they plan each
  // replay anew from what the same arrays hold then. They must be contiguous and stay where they are; block_table is as
  // wide as max_seq_len asks for. A batch that exceeds the limits leaves out untouched: check() tells.
  Plan plan(const Batch& batch, Stream stream = {});

  // Waits for the stream, and throws if the batch that was last planned on the device exceeded the limits.
  void check(Stream stream = {}) const;

  // The newest batch on other pages and slots, without cutting its work again: for another group of layers that has a
  // planner of its own, or where pages have moved.
  Plan update_block_table(const Tensor& block_table, const Tensor& slot_mapping, Stream stream = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qkv
