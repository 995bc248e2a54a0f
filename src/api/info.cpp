#include <fmt/format.h>

#include "core/environment.hpp"
#include "cpu/kernels.hpp"
#include "jit/disk_cache.hpp"
#include "jit/driver.hpp"
#include "jit/nvrtc_library.hpp"
#include "parallel/mpi_plugin.hpp"
#include "parallel/nccl_library.hpp"
#include "qkv/device.hpp"
#include "qkv/status.hpp"

namespace qkv {

std::vector<std::string> instruction_sets() {
  const auto names = cpu::instruction_set_names();
  return {names.begin(), names.end()};
}

std::string instruction_set_in_use() { return std::string(cpu::forward_kernels().name); }

std::string version() { return QKV_VERSION; }

namespace {

// info() must answer even where a setting is wrong: the error is what the user looks for.
template <class Ask>
std::string answer_or_error(Ask ask) {
  try {
    return fmt::format("{}", ask());
  } catch (const Error& error) {
    return fmt::format("error: {}", error.what());
  }
}

}  // namespace

std::string info() {
  std::string text = fmt::format("qkv {}\n", version());
  text += fmt::format("cpu instruction sets   {}\n", fmt::join(instruction_sets(), " "));
  text += fmt::format("cpu in use             {}\n", answer_or_error([] { return instruction_set_in_use(); }));
  text += fmt::format("cpu threads            {}\n", answer_or_error([] { return num_threads(); }));
  text += fmt::format("cuda driver            {}\n", jit::probe_driver().text);
  text += fmt::format("cuda compiler (NVRTC)  {}\n", jit::probe_nvrtc().text);
  text += fmt::format("cuda kernels on disk   {}\n", answer_or_error([] {
                        const jit::CachePlace place = jit::cache_place();
                        return place.folder.empty() ? place.origin : fmt::format("{} ({})", place.folder, place.origin);
                      }));
  text += fmt::format("ranks by NCCL          {}\n", parallel::probe_nccl().text);
  text += fmt::format("ranks by MPI           {}\n", parallel::probe_mpi().text);
  for (const char* name : kEnvironmentNames) {
    text += fmt::format("{:<22} {}\n", name, environment(name).value_or("(not set)"));
  }
  return text;
}

}  // namespace qkv
