// One engine a device.
#pragma once

#include "plan/engine.hpp"
#include "qkv/tensor.hpp"

namespace qkv::api {

const plan::Engine& engine_of(Device device);

}  // namespace qkv::api
