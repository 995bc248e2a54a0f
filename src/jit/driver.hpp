// NVIDIA's driver library, opened when first needed. Where it is looked for: docs/compile.md.
#pragma once

#include <concepts>
#include <string>
#include <string_view>
#include <vector>

#include "jit/cuda_api.hpp"
#include "jit/library.hpp"

namespace qkv::jit {

struct Driver : DriverFunctions {
  std::string path;
  int version = 0;  // of CUDA that the driver supports: 1000 · major + 10 · minor
  int num_devices = 0;
};

// Opens, initialises (cuInit) and checks that there is a device; throws unavailable saying what is missing and what to
// install. The second form is for tests: `names` are tried in turn, paths or names for the loader.
const Driver& driver();
Driver open_driver(const std::vector<std::string>& names);

// "13.0 at /usr/lib/…/libcuda.so.1; device 0: NVIDIA H200, sm_90, 132 multiprocessors, 139.8 GiB". Never throws.
Probe probe_driver();

// "CUDA_ERROR_INVALID_VALUE (invalid argument)"
std::string error_text(const DriverFunctions& functions, CUresult result);

[[noreturn]] void throw_failure(const DriverFunctions& functions, CUresult result, const char* call,
                                std::string_view what);

// Throws if the call failed: with CUDA's name and text of the error, the call's name, and what it was about (a launch:
// kernel and grid). Out of device memory is `unavailable`, everything else `internal`.
inline void check(CUresult result, const char* call, std::string_view what = "") {
  if (result != kSuccess) throw_failure(driver(), result, call, what);
}

// The same where describing costs something: describe() is called only if the call failed.
template <std::invocable Describe>
void check(CUresult result, const char* call, Describe describe) {
  if (result != kSuccess) throw_failure(driver(), result, call, describe());
}

}  // namespace qkv::jit
