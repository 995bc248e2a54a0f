// `qkv replay`: the command's options, and what it prints.
#pragma once

#include <CLI/CLI.hpp>

namespace qkv::replay {

void add_replay_command(CLI::App& app);

}  // namespace qkv::replay
