#pragma once

#include "plan/projection.hpp"

namespace qkv::cpu {

void project(const plan::ProjectionMatrix& matrix, const plan::ProjectionTensors& tensors);

}  // namespace qkv::cpu
