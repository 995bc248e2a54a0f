// News of each compile of a GPU kernel, and their count.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "qkv/export.hpp"

namespace qkv {

struct CompileEvent {
  enum class Kind : uint8_t {
    started,
    finished,
    failed,
    from_cache,  // read from disk; nothing was compiled
  };
  Kind kind = Kind::started;
  std::string kernel;     // in words
  std::string arch;       // "sm_90a"
  int64_t index = 0;      // compiles of this process so far, this one included
  double seconds = 0;     // of CPU; when finished
  int32_t registers = 0;  // of a thread; when finished or from cache
  int32_t spill_bytes = 0;
};
using CompileCallback = std::function<void(const CompileEvent&)>;

// Called on the thread that compiles, one call at a time; what it throws reaches whoever asked for the kernel. Replaces
// the lines on stderr; an empty one brings them back.
QKV_EXPORT void set_compile_callback(CompileCallback callback);

// How often this process has started the compiler. It stays where it is once all kernels in use are known.
QKV_EXPORT int64_t num_compiles();

}  // namespace qkv
