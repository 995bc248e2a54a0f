// `qkv warmup` and `qkv why`: which kernels a model's layers reach, compiled beforehand or told.
#pragma once

#include <CLI/CLI.hpp>

namespace qkv::tools {

void add_warmup_command(CLI::App& app);
void add_why_command(CLI::App& app);

}  // namespace qkv::tools
