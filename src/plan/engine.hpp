// The interface that engines fill in.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/index/cost.hpp"
#include "core/index/split.hpp"
#include "plan/capacity.hpp"
#include "plan/gather.hpp"
#include "plan/plan_data.hpp"
#include "plan/projection.hpp"
#include "qkv/attention.hpp"
#include "qkv/ops.hpp"

namespace qkv::plan {

// What the planner asks of a device, besides how it cuts a request.
struct DeviceRules {
  // Packed rows of an item whose keys several requests share, at most; 0 = the engine's items are of one request.
  int32_t shared_few_rows = 0;
  int32_t shared_many_rows = 0;
  // Rows of such an item from which on the many-rows kernel is the quicker one, where bits may change; 0 = never.
  int32_t many_rows_from = 0;
  index::DeviceCosts costs = {};
  // A row's bits depend on which tiles its item reads, seen or not: only members that read the same ones are joined.
  bool shares_equal_tiles_only = false;
};

// All tensors are checked before an engine sees them.
struct ForwardCall {
  const LayerSpec& layer;
  const PlanData& plan;
  Tensor query;
  Tensor key;    // pages [num_pages, page_size, num_kv_heads, head_dim], or dense [num_keys, num_kv_heads, head_dim]
  Tensor value;  // likewise
  Tensor out;
  Tensor lse;  // may be absent
  Stream stream;
  Tensor key_scale, value_scale;  // given for 8-bit caches
  Tensor out_scale;               // given for outputs of 8-bit floats
  Tensor query_scale;             // given for queries of 8-bit floats; query_scales() says what they belong to
};

// What an engine keeps of one layer: its kernels, chosen and compiled when the layer is created.
class LayerEngine {
 public:
  virtual ~LayerEngine() = default;
  // How a request is cut. By the layer and these two numbers only, so that its bits never depend on its batch.
  virtual index::RequestCut cut_request(int32_t q_len, int32_t kv_len) const = 0;
  virtual DeviceRules device_rules() const = 0;
  // Of a planner's plans: its launches are there for every batch, whether or not it has items for them.
  virtual DeviceRules planner_rules(const PlanLimits& /*limits*/) const { return device_rules(); }
  virtual CutBounds cut_bounds() const = 0;
  // Memory for any plan within the capacity; none where the engine reads plans where they are.
  virtual std::shared_ptr<PlacedPlan> reserve(const PlanCapacity& capacity, const Tensor& workspace) const = 0;
  virtual int64_t workspace_bytes(const PlanCapacity& capacity) const = 0;
  // Brings the plan to where the engine reads it: to plan.placed where that is reserved, else to memory of its own.
  virtual void place(PlanData& plan, Stream stream) const = 0;
  // The same for a batch on the device, with kernels of its own; plan.placed is reserved with on_device.
  virtual void place_on_device(PlanData& plan, const DeviceBatch& batch, Stream stream) const = 0;
  // Waits: did the last batch that was placed so exceed its memory or limits?
  virtual bool was_refused(const PlacedPlan& placed, Stream stream) const = 0;
  // Calls on the stream are recorded, not run.
  virtual bool is_capturing(Stream stream) const = 0;
  virtual void forward(const ForwardCall& call) const = 0;
  virtual void update_cache(const Tensor& key, const Tensor& value, const KvCache& cache, const PlanData& plan,
                            Stream stream) const = 0;
};

// A matrix and what an engine needs to multiply by it. Safe to use from several threads.
class Projector {
 public:
  virtual ~Projector() = default;
  virtual void project(const ProjectionTensors& tensors, Stream stream) const = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual std::unique_ptr<LayerEngine> make_layer(const LayerSpec& layer) const = 0;
  // Slot -1: nothing of the token is read or written. `scales`: what the cache's scales belong to, no requests.
  virtual void cache_write(const Tensor& key, const Tensor& value, const KvCache& cache, KvScales scales,
                           std::span<const int64_t> slot_mapping, Stream stream) const = 0;
  // A state without `out` has values of 0: it takes its part of the weight.
  virtual void merge_states(const std::vector<State>& states, const Tensor& out, const Tensor& lse,
                            const Tensor& out_scale, Stream stream) const = 0;
  virtual void quantise(const Tensor& rows, const Tensor& out, const Tensor& scale, ScaleSource source,
                        const Tensor& query_start_loc, Stream stream) const = 0;
  // Brings a gather's arrays to where the engine reads them; then pages [num_pages, page_size, num_heads, head_dim] to
  // rows [plan's rows, num_heads, head_dim] of the same dtype; or from 8-bit elements to f32, f16 or bf16, times
  // *scale. Pages with a head stride of 0 spread a row over all heads.
  virtual void place(GatherPlan& plan, Stream stream) const = 0;
  virtual std::unique_ptr<Projector> make_projector(const ProjectionMatrix& matrix) const = 0;
  virtual void gather(const Tensor& pages, const GatherPlan& plan, const Tensor& rows, const Tensor& scale,
                      Stream stream) const = 0;
  // What is put on `later` from now on runs after all that is on `earlier`. Streams that are the same are in order.
  virtual void follow(Stream later, Stream earlier) const = 0;
};

}  // namespace qkv::plan
