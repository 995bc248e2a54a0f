// `qkv mask`: what an expression means, who sees whom, and what is skipped.
#pragma once

#include <CLI/CLI.hpp>

namespace qkv::tools {

void add_mask_command(CLI::App& app);

}  // namespace qkv::tools
