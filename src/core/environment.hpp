// The environment names that the library reads. A new one is added here and nowhere else.
#pragma once

#include <optional>
#include <string>

namespace qkv {

inline constexpr const char* kEnvironmentNames[] = {
    "QKV_CACHE_DIR", "QKV_CACHE_MB", "QKV_CHECK", "QKV_FORCE", "QKV_LOG",     "QKV_MPI_LIBRARY", "QKV_NCCL_LIBRARY",
    "QKV_NVRTC",     "QKV_THREADS",  "CUDA_HOME", "HOME",      "VIRTUAL_ENV", "XDG_CACHE_HOME"};

// The value of one of kEnvironmentNames; nothing if unset or empty.
std::optional<std::string> environment(const char* name);

// QKV_CHECK: 1 = engines look again, before each call, at what a plan holds. Throws for anything but 0 and 1.
bool is_checked_mode();

}  // namespace qkv
