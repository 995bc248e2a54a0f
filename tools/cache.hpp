// `qkv cache`: the compiled kernels on disk.
#pragma once

#include <CLI/CLI.hpp>

namespace qkv::tools {

void add_cache_command(CLI::App& app);

}  // namespace qkv::tools
