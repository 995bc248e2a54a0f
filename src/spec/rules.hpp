// The one table of what a layer may be. Creating a layer, explain(), and the printed support matrix all run it.
#pragma once

#include <vector>

#include "qkv/layer.hpp"
#include "qkv/status.hpp"

namespace qkv::spec {

// Everything that stands against running the layer on the device; empty = supported. Nothing is thrown.
std::vector<Error> reasons_against(const LayerSpec& spec, Device device);

}  // namespace qkv::spec
