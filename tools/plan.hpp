// qkv plan: what a batch becomes on a device.
#pragma once

#include <CLI/CLI.hpp>

namespace qkv::tools {

void add_plan_command(CLI::App& app);

}  // namespace qkv::tools
