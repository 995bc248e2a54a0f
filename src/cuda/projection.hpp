// MLA's projection through cuBLAS.
#pragma once

#include <memory>

#include "plan/engine.hpp"

namespace qkv::cuda {

// Throws unavailable if there is no cuBLAS.
std::unique_ptr<plan::Projector> make_projector(const plan::ProjectionMatrix& matrix, int32_t device_index);

}  // namespace qkv::cuda
