// All that a forward kernel is compiled for. Lengths, strides and counts are arguments of the launch, not part of it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "jit/nvrtc.hpp"
#include "qkv/layer.hpp"

namespace qkv::cuda {

struct ForwardKey {
  const char* kernel;  // "forward_sm80": the entry, and the file that holds it
  std::string arch;
  int tile_q;
  int tile_kv;
  // What this kernel alone asks for, as its head says.
  std::vector<std::pair<const char*, int>> constants = {};
};

// The kernel's text for the layer: its constants, its mask, its file. Named in words for logs and errors.
jit::Source forward_source(const LayerSpec& layer, const ForwardKey& key);

// A kernel without constants: the file of that name below src/cuda/device.
jit::Source plain_source(const char* kernel, const std::string& arch);

// The kernel that writes new tokens to caches with such scales.
jit::Source cache_write_source(KvScales scales, const std::string& arch);

// 0 f32, 1 f16, 2 bf16, 3 f8e4m3, 4 f8e5m2, 5 i8, as in device code.
int dtype_code(DType dtype);

// Whether each token of the cache has scales of its own: the one granularity that kernels know.
bool has_token_scales(const LayerSpec& layer);

}  // namespace qkv::cuda
