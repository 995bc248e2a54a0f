// A layer that can run on the device, or an Error with every reason against it.
#pragma once

#include "qkv/layer.hpp"

namespace qkv::api {

LayerSpec checked_layer(LayerSpec spec, Device device);

}  // namespace qkv::api
