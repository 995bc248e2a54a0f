// `qkv check`: random cases against the float64 oracle.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "cases.hpp"

namespace qkv::tools {

// Runs the case in all ways that must agree. Returns what is wrong, in one line, or nothing.
std::string failure_of(const Case& random_case, Device device = {});

void add_check_command(CLI::App& app);

}  // namespace qkv::tools
