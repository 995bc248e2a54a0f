#include "cache.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "qkv/kernel_cache.hpp"
#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

std::string size_text(int64_t num_bytes) {
  constexpr int64_t kMegabyte = 1 << 20;
  return num_bytes < 10 * kMegabyte ? fmt::format("{:.1f} KB", static_cast<double>(num_bytes) / 1024)
                                    : fmt::format("{} MB", num_bytes / kMegabyte);
}

void print_place(const KernelCachePlace& place) {
  if (place.folder.empty()) {
    fmt::print("No folder: {}. Kernels are compiled by each process.\n", place.origin);
  } else {
    fmt::print("{} ({}), at most {}\n", place.folder, place.origin, size_text(place.max_bytes));
  }
}

void list() {
  print_place(kernel_cache_place());
  int64_t num_bytes = 0;
  const std::vector<CachedKernel> kernels = cached_kernels();
  if (!kernels.empty())
    fmt::print("\n{:<16} {:>10} {:>9} {:>5} {:>7}  kernel\n", "last used", "size", "seconds", "regs", "spills");
  for (const CachedKernel& kernel : kernels) {
    num_bytes += kernel.num_bytes;
    fmt::print("{:%Y-%m-%d %H:%M} {:>10} ", fmt::localtime(static_cast<std::time_t>(kernel.last_used)),
               size_text(kernel.num_bytes));
    if (kernel.fault.empty()) {
      fmt::print("{:>9.2f} {:>5} {:>7}  {} ({})\n", kernel.compile_seconds, kernel.registers, kernel.spill_bytes,
                 kernel.name, kernel.compiler);
    } else {
      fmt::print("{:>9} {:>5} {:>7}  {}: {}\n", "-", "-", "-", kernel.path, kernel.fault);
    }
  }
  fmt::print("\n{} kernels, {}\n", kernels.size(), size_text(num_bytes));
}

void verify() {
  print_place(kernel_cache_place());
  size_t damaged = 0;
  const std::vector<CachedKernel> kernels = cached_kernels();
  for (const CachedKernel& kernel : kernels) {
    if (kernel.fault.empty()) continue;
    ++damaged;
    fmt::print("{}: {}\n", kernel.path, kernel.fault);
  }
  fmt::print("{} sound, {} damaged{}\n", kernels.size() - damaged, damaged,
             damaged == 0 ? "" : ": these are never loaded, and compiled again when they are wanted");
  if (damaged != 0) throw CLI::RuntimeError(1);
}

struct ArchiveOptions {
  std::string file;
  std::string arch;
};

}  // namespace

void add_cache_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("cache", "The compiled GPU kernels on disk");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n  qkv cache ls\n  qkv cache export kernels.qkv --arch sm_90a\n  qkv cache import kernels.qkv");
  command->add_subcommand("ls", "Place, size and every kernel, the least recently used first")->callback(&list);
  command->add_subcommand("verify", "Read all entries and name those that are damaged; the exit status is 1 if any is")
      ->callback(&verify);
  command->add_subcommand("clear", "Delete all entries")->callback([] {
    fmt::print("{} kernels deleted from {}\n", clear_kernel_cache(), kernel_cache_place().folder);
  });
  const auto options = std::make_shared<ArchiveOptions>();
  CLI::App* writer =
      command->add_subcommand("export", "Write all sound entries to one file, to be imported on another machine");
  writer->add_option("file", options->file, "The archive to write")->required();
  writer->add_option("--arch", options->arch, "Only kernels of this architecture, such as sm_90a");
  writer->callback([options] {
    const auto is_written = [&](const CachedKernel& kernel) {
      return kernel.fault.empty() && (options->arch.empty() || kernel.arch == options->arch);
    };
    const std::vector<CachedKernel> kernels = cached_kernels();
    if (std::none_of(kernels.begin(), kernels.end(), is_written)) {
      throw Error(ErrorCode::unavailable, "cache export",
                  fmt::format("no sound kernel{} in {}", options->arch.empty() ? "" : " of " + options->arch,
                              kernel_cache_place().folder),
                  "kernels that `qkv cache ls` lists; `qkv warmup` compiles some");
    }
    fmt::print("{} kernels written to {}\n", export_kernels(options->file, options->arch), options->file);
  });
  CLI::App* reader =
      command->add_subcommand("import", "Add the kernels of an archive; a damaged one is refused as a whole");
  reader->add_option("file", options->file, "The archive to read")->required();
  reader->callback([options] {
    fmt::print("{} kernels added to {}\n", import_kernels(options->file), kernel_cache_place().folder);
  });
}

}  // namespace qkv::tools
