#include "parallel/mpi_plugin.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <vector>

#include "core/checks.hpp"
#include "core/environment.hpp"

namespace qkv::parallel {
namespace {

constexpr const char* kFile = "libqkv_mpi.so";

std::optional<MpiPlugin> open_file(const std::string& file, std::string& reason) {
  const auto library = jit::open_library(file, reason);  // the reason names a libmpi that is missing
  if (!library) return std::nullopt;
  MpiTableFunction* table = nullptr;
  if (!jit::find_function(*library, kMpiTableSymbol, table)) {
    reason = fmt::format("{}: has no {}", library->path, kMpiTableSymbol);
    return std::nullopt;
  }
  if (table()->version != kMpiTableVersion) {
    reason = fmt::format("{}: of version {}, where this library needs {}", library->path, table()->version,
                         kMpiTableVersion);
    return std::nullopt;
  }
  return MpiPlugin{table(), library->path};
}

}  // namespace

MpiPlugin open_mpi_plugin(const std::optional<std::string>& named_file, const std::string& folder) {
  const std::vector<std::string> files =
      named_file ? std::vector{*named_file} : std::vector<std::string>{std::filesystem::path(folder) / kFile, kFile};
  std::string reasons;
  for (const std::string& file : files) {
    std::string reason;
    if (auto plugin = open_file(file, reason)) return *plugin;
    reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", reason);
  }
  refuse(named_file ? "QKV_MPI_LIBRARY" : kFile, fmt::format("no plug-in that opens ({})", reasons),
         "MPI, and a qkv that was built where MPI is: on Debian, apt-get install openmpi-bin to run, libopenmpi-dev to "
         "build; QKV_MPI_LIBRARY=<file> names a plug-in elsewhere",
         ErrorCode::unavailable);
}

const MpiPlugin& mpi_plugin() {
  static const MpiPlugin opened = open_mpi_plugin(environment("QKV_MPI_LIBRARY"), jit::own_folder());
  return opened;
}

jit::Probe probe_mpi() {
  try {
    return {true, fmt::format("at {}", mpi_plugin().path)};
  } catch (const std::exception& error) {
    return {false, error.what()};
  }
}

}  // namespace qkv::parallel
