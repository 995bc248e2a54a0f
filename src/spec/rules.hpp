// The one table of what a layer may be. Creating a layer, explain(), and the printed support matrix all run it.
#pragma once

#include <string>
#include <vector>

#include "qkv/layer.hpp"
#include "qkv/status.hpp"

namespace qkv::spec {

struct Reason {
  ErrorCode code;
  std::string argument;
  std::string value;
  std::string allowed;
};

// Everything that stands against running the layer on the device; empty = supported.
std::vector<Reason> reasons_against(const LayerSpec& spec, Device device);

}  // namespace qkv::spec
