// Tells the host program of compiles, or stderr where it has not asked.
#pragma once

#include "qkv/compile.hpp"

namespace qkv::jit {

void report(const CompileEvent& event);

}  // namespace qkv::jit
