#pragma once

#include <memory>

#include "plan/engine.hpp"

namespace qkv::cuda {

// Opens the driver; throws unavailable or unsupported with the reason.
std::unique_ptr<plan::Engine> make_engine(int32_t device_index);

}  // namespace qkv::cuda
