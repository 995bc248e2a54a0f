// `qkv check`: random cases against the float64 oracle.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "cases.hpp"
#include "qkv/reference.hpp"

namespace qkv::tools {

// Runs the case in all ways that must agree. Returns what is wrong, in one line, or nothing.
std::string failure_of(const Case& random_case, Device device = {});

// The first element of the case's rows in which out·out_scale or lse (if given), read on the host, is further from the
// definition than the device's rounding explains, and `further`; or nothing.
std::string difference(const Case& c, Device device, const Tensor& out, const Tensor& lse,
                       const reference::Result& expected, double out_scale = 1, double further = 0);

// Half a step of the dtype, relative to the number.
double rounding_of(DType dtype);

void add_check_command(CLI::App& app);

}  // namespace qkv::tools
