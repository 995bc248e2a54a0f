// Which kernels a layer has on a GPU, and which of them a launch runs: pure functions of the layer, the architecture
// and the request's shape. The engine chooses by them, and warm-up traces them, so that what is compiled beforehand is
// what runs. No device is needed.
#pragma once

#include <string>
#include <vector>

#include "core/index/split.hpp"
#include "cuda/forward_sm90_few_rows.hpp"
#include "cuda/forward_sm90_many_rows.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/memory.hpp"
#include "plan/capacity.hpp"
#include "qkv/layer.hpp"
#include "qkv/warmup.hpp"

namespace qkv::cuda {

// What device_facts() says of a GPU of that architecture, as far as keys depend on it. Throws for one that is unknown.
DeviceFacts facts_of_arch(const std::string& arch);

// The two forward kernels of a layer.
struct ForwardKernels {
  bool few_rows_sm90;   // else forward_sm80
  bool many_rows_sm90;  // else forward_sm80
  index::CutRules cut;  // by their tiles; cut.few_rows packed rows of a request are few
};
ForwardKernels forward_kernels(const LayerSpec& layer, const DeviceFacts& facts);

// How the planner cuts a request.
index::RequestCut cut_request(const LayerSpec& layer, const ForwardKernels& kernels, int32_t q_len, int32_t kv_len);

// How far: what a planner's buffers are sized by.
plan::CutBounds cut_bounds(const LayerSpec& layer, const ForwardKernels& kernels);

// All of a launch that may choose its kernel, besides the layer.
struct LaunchKind {
  int64_t num_rows;          // packed rows of a request
  bool few_items;            // at most one a multiprocessor
  bool clustered;            // splits join within clusters
  bool shared_rows = false;  // an item's rows are of several requests
  bool takes_turns = false;  // a planner's: its items may be more than its CTAs
};
ForwardKey forward_key(const LayerSpec& layer, const DeviceFacts& facts, const LaunchKind& launch);

// forward_key() traced over all launches of requests within the bounds, and of the layer's planners, then the small
// kernels of the layer. Each once.
std::vector<jit::Source> reachable_sources(const LayerSpec& layer, const DeviceFacts& facts,
                                           const RequestBounds& bounds, PlannerUse planners = PlannerUse::none);

// The forward kernels of few rows that creating the layer compiles, also those that its batches never reach.
std::vector<jit::Source> created_sources(const LayerSpec& layer, const DeviceFacts& facts);

}  // namespace qkv::cuda
