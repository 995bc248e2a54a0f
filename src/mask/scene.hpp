// From a MaskScene to what the evaluators read: operands found by name, checked, and moved to the request.
#pragma once

#include <vector>

#include "mask/program.hpp"

namespace qkv::mask {

// Throws Error naming the operand that is missing, of another type, or too short.
ProgramInput bind_scene(const std::vector<OperandDeclaration>& operands, const MaskScene& scene);

}  // namespace qkv::mask
