// A layer that can run on the device, or an Error with every reason against it.
#pragma once

#include <vector>

#include "qkv/layer.hpp"
#include "qkv/status.hpp"

namespace qkv::api {

LayerSpec checked_layer(LayerSpec spec, Device device);

// The first reason as the Error, the others behind what it allows.
[[noreturn]] void throw_all(const std::vector<Error>& reasons);

}  // namespace qkv::api
