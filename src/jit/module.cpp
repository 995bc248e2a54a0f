#include "jit/module.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <memory>
#include <string_view>

#include "core/checks.hpp"
#include "jit/compile_news.hpp"
#include "jit/driver.hpp"
#include "jit/nvrtc_library.hpp"

namespace qkv::jit {
namespace {

int32_t attribute(CUfunction function, CUfunction_attribute which, const std::string& name) {
  int value = 0;
  check(driver().func_get_attribute(&value, which, function), "cuFuncGetAttribute", name);
  return value;
}

// Asking for the largest costs nothing: a launch is given what it asks for.
int32_t allow_all_shared_memory(CUfunction function, const std::string& name) {
  CUdevice device = 0;
  int most = 0;
  check(driver().ctx_get_device(&device), "cuCtxGetDevice", name);
  check(driver().device_get_attribute(&most, CUdevice_attribute::max_shared_bytes_per_block, device),
        "cuDeviceGetAttribute", name);
  const int32_t dynamic = most - attribute(function, CUfunction_attribute::shared_bytes, name);
  check(driver().func_set_attribute(function, CUfunction_attribute::max_dynamic_shared_bytes, dynamic),
        "cuFuncSetAttribute", [&] { return fmt::format("{}, {} bytes of dynamic shared memory", name, dynamic); });
  return dynamic;
}

class CudaToolchain final : public Toolchain {
 public:
  uint64_t current_context() const override {
    CUcontext context = nullptr;
    check(driver().ctx_get_current(&context), "cuCtxGetCurrent");
    if (context == nullptr) {
      refuse("CUDA context", "none on this thread", "a current one (cuCtxSetCurrent, or any call of the CUDA runtime)");
    }
    unsigned long long id = 0;  // a context's address may serve another one later
    check(driver().ctx_get_id(context, &id), "cuCtxGetId");
    return id;
  }

  std::string compiler() const override { return fmt::format("NVRTC {}.{}", nvrtc().major, nvrtc().minor); }

  Compiled compile(const Source& source) const override { return jit::compile(source); }

  Kernel load(const Source& source, const Compiled& compiled) const override {
    // Modules are never unloaded: kernels live as long as the context, graphs may hold them.
    CUmodule module = nullptr;
    Kernel kernel;
    kernel.name = source.name;
    kernel.usage = compiled.usage;
    check(driver().module_load_data(&module, compiled.cubin.data()), "cuModuleLoadData",
          [&] { return fmt::format("{} ({})", source.name, source.arch); });
    check(driver().module_get_function(&kernel.function, module, compiled.entry.c_str()), "cuModuleGetFunction",
          source.name);
    kernel.dynamic_shared_bytes = allow_all_shared_memory(kernel.function, source.name);
    return kernel;
  }
};

std::string hash_of(std::span<const Header> headers) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_128bits_reset(state.get());
  for (const Header& header : headers) {
    for (const std::string_view part : {header.name, header.text}) {
      XXH3_128bits_update(state.get(), part.data(), part.size() + 1);  // with the zero, which parts name and text
    }
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state.get());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

// Headers outlive every Source and never change, so their place tells them apart: launches look kernels up by their
// keys, and hashing some 350 KB of text each time would cost more than the launch.
const std::string& known_hash_of(std::span<const Header> headers) {
  static OnceTable<std::pair<const Header*, size_t>, std::string> hashes;
  return hashes.get({headers.data(), headers.size()}, [&] { return hash_of(headers); });
}

CompileEvent event_of(CompileEvent::Kind kind, const Source& source, int64_t index, const Compiled& compiled = {}) {
  return {kind,
          source.name,
          source.arch,
          index,
          compiled.seconds,
          compiled.usage.registers,
          compiled.usage.spill_store_bytes + compiled.usage.spill_load_bytes};
}

}  // namespace

const Toolchain& cuda_toolchain() {
  static const CudaToolchain toolchain;
  return toolchain;
}

std::string key_text(const Source& source) {
  return fmt::format("{}\n{}\nheaders {}\n{}", source.arch, fmt::join(source.options, " "),
                     known_hash_of(source.headers), source.text);
}

const Kernel& Kernels::get(const Source& source) {
  return loaded_.get({toolchain_.current_context(), key_text(source)},
                     [&] { return toolchain_.load(source, compiled(source)); });
}

const Compiled& Kernels::compiled(const Source& source) {
  bool ignored = false;
  return compiled_.get(key_text(source), [&] { return obtain(source, ignored); });
}

bool Kernels::make_ready(const Source& source) {
  bool was_compiled = false;
  compiled_.get(key_text(source), [&] { return obtain(source, was_compiled); });
  return was_compiled;
}

Compiled Kernels::obtain(const Source& source, bool& was_compiled) {
  was_compiled = true;
  if (cache_ == nullptr) return compile(source);
  was_compiled = false;
  const CacheEntry wanted{source.name, toolchain_.compiler(), source.arch, key_text(source), {}};
  Compiled compiled = cache_->get(wanted, [&] {
    was_compiled = true;
    return compile(source);
  });
  if (!was_compiled) report(event_of(CompileEvent::Kind::from_cache, source, compiles_so_far_, compiled));
  return compiled;
}

Compiled Kernels::compile(const Source& source) {
  using enum CompileEvent::Kind;
  const int64_t index = ++compiles_so_far_;
  report(event_of(started, source, index));
  Compiled compiled;
  try {
    compiled = toolchain_.compile(source);
  } catch (...) {
    report(event_of(failed, source, index));
    throw;
  }
  report(event_of(finished, source, index, compiled));
  return compiled;
}

Kernels& kernels() {
  static Kernels table(cuda_toolchain(), &disk_cache());
  return table;
}

}  // namespace qkv::jit

namespace qkv {

int64_t num_compiles() { return jit::kernels().compiles_so_far(); }

}  // namespace qkv
