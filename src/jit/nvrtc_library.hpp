// NVIDIA's run-time compiler, opened when first needed. docs/compile.md tells users where it is looked for.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "jit/cuda_api.hpp"
#include "jit/library.hpp"

namespace qkv::jit {

struct Nvrtc : NvrtcFunctions {
  std::string path;
  std::string origin;  // why it was looked for there: QKV_NVRTC, the loader's search, …
  int major = 0;
  int minor = 0;
};

// What the search depends on, gathered in one place so that it can be tested.
struct Surroundings {
  std::optional<std::string> named_file;   // QKV_NVRTC: this file and no other
  std::optional<std::string> cuda_home;    // CUDA_HOME
  std::optional<std::string> virtual_env;  // VIRTUAL_ENV
  std::string own_folder;                  // of the shared object that holds qkv
  std::string working_folder;
};
Surroundings surroundings();

// A folder that may hold NVRTC; an empty one stands for the loader's own search.
struct SearchPlace {
  std::string folder;
  std::string origin;
};
// own_wheel: where NVIDIA's wheel of the library alone puts it; since CUDA 13, all wheels share a folder.
std::vector<SearchPlace> search_places(const Surroundings& around,
                                       const std::string& own_wheel = "nvidia/cuda_nvrtc/lib");

// The first of the files in the folder that open_file(path, reason), which returns an optional, takes. `reasons` grows
// by why others were not taken.
template <class OpenFile>
auto open_in(const SearchPlace& place, std::span<const char* const> files, std::string& reasons, OpenFile open_file)
    -> decltype(open_file(std::string(), reasons)) {
  for (const char* file : files) {
    const std::filesystem::path path = std::filesystem::path(place.folder) / file;
    std::error_code ignored;
    if (!place.folder.empty() && !std::filesystem::exists(path, ignored)) continue;
    std::string reason;
    if (auto opened = open_file(path.string(), reason)) return opened;
    reasons += (reasons.empty() ? "" : "; ") + reason;
  }
  return std::nullopt;
}

// 12.3 or later: the first that knows sm_90a and C++20 in full.
bool is_supported_version(int major, int minor);

// Both throw unavailable: what was searched, what was found and not taken, and what to install. A library that is too
// old or broken does not end the search; a QKV_NVRTC that cannot be taken does.
Nvrtc open_nvrtc(const Surroundings& around);
Nvrtc open_nvrtc_in(const std::vector<SearchPlace>& places);
const Nvrtc& nvrtc();

// "13.0 at /usr/local/cuda/lib64/libnvrtc.so.13 (the loader's search)". Never throws.
Probe probe_nvrtc();

}  // namespace qkv::jit
