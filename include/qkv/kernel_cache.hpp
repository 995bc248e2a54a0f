// Compiled GPU kernels on disk: looking into the folder, and moving kernels between machines. The engine itself needs
// none of these calls. docs/compile.md says where the folder is.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qkv/export.hpp"

namespace qkv {

struct CachedKernel {
  std::string path;
  int64_t num_bytes = 0;
  int64_t last_used = 0;  // seconds since 1970
  std::string fault;      // why it will not be used; empty = sound, and then what follows is known

  std::string name;      // in words
  std::string compiler;  // "NVRTC 13.0"
  std::string arch;      // "sm_90a"
  double compile_seconds = 0;
  int32_t registers = 0;  // of a thread
  int32_t spill_bytes = 0;
};

// The folder in use, and the environment name that chose it; folder is empty where kernels are not kept on disk, and
// origin says why.
struct KernelCachePlace {
  std::string folder;
  std::string origin;
  int64_t max_bytes = 0;
};
QKV_EXPORT KernelCachePlace kernel_cache_place();

// Every entry, read in full and checked, the least recently used first. A folder that is not there has none.
QKV_EXPORT std::vector<CachedKernel> cached_kernels();

// Deletes all entries and returns their number. Processes that run keep the kernels they have.
QKV_EXPORT int64_t clear_kernel_cache();

// All sound entries of an architecture (empty = of all) in one file, which import_kernels reads on any machine. Return
// the number of kernels. Both throw: where the file cannot be written or read; an archive that is damaged is refused
// as a whole, before anything is written.
QKV_EXPORT int64_t export_kernels(const std::string& path, const std::string& arch = "");
QKV_EXPORT int64_t import_kernels(const std::string& path);

}  // namespace qkv
