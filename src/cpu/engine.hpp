#pragma once

#include <memory>

#include "plan/engine.hpp"

namespace qkv::cpu {

std::unique_ptr<plan::Engine> make_engine();

}  // namespace qkv::cpu
