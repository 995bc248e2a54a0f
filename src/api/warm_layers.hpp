// Warm-up as an option of a layer's creation.
#pragma once

#include <vector>

#include "qkv/warmup.hpp"

namespace qkv::api {

// Compiles what batches of these layers within the bounds can reach, and of the single calls those that `calls` names;
// on a CPU there is nothing to compile. Throws where a kernel does not compile: a layer shall not be had without it.
void warm_layers(const std::vector<LayerSpec>& layers, Device device, const RequestBounds& bounds,
                 WarmupOptions calls = {});

}  // namespace qkv::api
