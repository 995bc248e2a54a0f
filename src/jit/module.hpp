// The process's kernels: source to a loaded kernel, each compiled once and loaded once per CUDA context.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

#include "jit/cuda_api.hpp"
#include "jit/disk_cache.hpp"
#include "jit/nvrtc.hpp"
#include "jit/once_table.hpp"

namespace qkv::jit {

struct Kernel {
  CUfunction function = nullptr;
  std::string name;                  // the source's, for errors
  KernelUsage usage;                 // registers, spills
  int32_t dynamic_shared_bytes = 0;  // what a launch may ask for: all that the device has besides the static part
};

// What the table does to the world outside; tests bring their own.
class Toolchain {
 public:
  virtual ~Toolchain() = default;
  // Names the CUDA context that is current on this thread; never given out twice.
  virtual uint64_t current_context() const = 0;
  // "NVRTC 13.0": another compiler makes other code.
  virtual std::string compiler() const = 0;
  virtual Compiled compile(const Source& source) const = 0;
  // Into the current context.
  virtual Kernel load(const Source& source, const Compiled& compiled) const = 0;
};

// NVRTC and the driver.
const Toolchain& cuda_toolchain();

// All that can change a kernel's bits, as text: arch, options, hash of the headers, the text. Not the name.
std::string key_text(const Source& source);

class Kernels {
 public:
  // With a cache on disk the compiler runs only for what is not there.
  explicit Kernels(const Toolchain& toolchain, DiskCache* cache = nullptr) : toolchain_(toolchain), cache_(cache) {}

  // For the context that is current on this thread. The kernel stays for the process's life. May be called from many
  // threads; a failure is thrown to all who wait for it and forgotten.
  const Kernel& get(const Source& source);

  // The same without a device: compiles what get() would compile, for warm-up and checks.
  const Compiled& compiled(const Source& source);
  // The same; whether this call has started the compiler.
  bool make_ready(const Source& source);

  // How often the compiler has been started by this table, failures included.
  int64_t compiles_so_far() const { return compiles_so_far_; }

 private:
  // Where machine code comes from.
  Compiled obtain(const Source& source, bool& was_compiled);
  Compiled compile(const Source& source);

  const Toolchain& toolchain_;
  DiskCache* const cache_;
  std::atomic<int64_t> compiles_so_far_ = 0;
  OnceTable<std::string, Compiled> compiled_;
  OnceTable<std::pair<uint64_t, std::string>, Kernel> loaded_;
};

// The process's table, over cuda_toolchain() and disk_cache().
Kernels& kernels();

}  // namespace qkv::jit
