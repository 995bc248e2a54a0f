#include "parallel/nccl_library.hpp"

#include <fmt/format.h>

#include "core/checks.hpp"
#include "core/environment.hpp"

namespace qkv::parallel {
namespace {

constexpr const char* kFiles[] = {"libnccl.so.2", "libnccl.so"};
constexpr int kOldest = 21300;  // 2.13: the first that says what went wrong (ncclGetLastError)

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

const char* missing_symbol(const jit::Library& library, NcclFunctions& f) {
  const char* missing = nullptr;
  const auto find = [&](const char* symbol, auto& function) {
    if (!jit::find_function(library, symbol, function) && missing == nullptr) missing = symbol;
  };
  find("ncclGetVersion", f.get_version);
  find("ncclGetErrorString", f.get_error_string);
  find("ncclGetLastError", f.get_last_error);
  find("ncclGetUniqueId", f.get_unique_id);
  find("ncclCommInitRank", f.comm_init_rank);
  find("ncclCommDestroy", f.comm_destroy);
  find("ncclCommAbort", f.comm_abort);
  find("ncclCommGetAsyncError", f.comm_get_async_error);
  find("ncclCommCount", f.comm_count);
  find("ncclCommUserRank", f.comm_user_rank);
  find("ncclCommCuDevice", f.comm_cu_device);
  find("ncclAllGather", f.all_gather);
  find("ncclReduceScatter", f.reduce_scatter);
  find("ncclSend", f.send);
  find("ncclRecv", f.receive);
  find("ncclGroupStart", f.group_start);
  find("ncclGroupEnd", f.group_end);
  return missing;
}

std::optional<Nccl> open_file(const std::string& file, std::string& reason) {
  const auto library = jit::open_library(file, reason);
  if (!library) return std::nullopt;
  Nccl found;
  found.path = library->path;
  // Asked first: an old library also lacks functions, and its age is the better reason.
  const bool has_version = jit::find_function(*library, "ncclGetVersion", found.get_version);
  if (has_version && found.get_version(&found.version) == kNcclSuccess && found.version < kOldest) {
    reason = fmt::format("{}: version {} is too old", found.path, version_text(found.version));
    return std::nullopt;
  }
  if (const char* symbol = missing_symbol(*library, found)) {
    reason = fmt::format("{}: has no {}", found.path, symbol);
    return std::nullopt;
  }
  return found;
}

[[noreturn]] void refuse_nccl(const std::string& argument, const std::string& reasons) {
  refuse(argument, fmt::format("no library that can be used ({})", reasons),
         fmt::format("NCCL {} or later: pip install nvidia-nccl-cu13, or libnccl2 of NVIDIA's packages, or "
                     "QKV_NCCL_LIBRARY=<its file>",
                     version_text(kOldest)),
         ErrorCode::unavailable);
}

}  // namespace

Nccl open_nccl(const std::optional<std::string>& named_file, const std::vector<jit::SearchPlace>& places) {
  std::string reasons;
  if (named_file) {
    if (auto found = open_file(*named_file, reasons)) return *found;
    refuse_nccl("QKV_NCCL_LIBRARY", reasons);
  }
  for (const jit::SearchPlace& place : places) {
    if (auto found = jit::open_in(place, kFiles, reasons, open_file)) return *found;
  }
  refuse_nccl("libnccl", reasons);
}

const Nccl& nccl() {
  static const Nccl opened =  // tried again after a failure
      open_nccl(environment("QKV_NCCL_LIBRARY"), jit::search_places(jit::surroundings(), "nvidia/nccl/lib"));
  return opened;
}

jit::Probe probe_nccl() {
  try {
    return {true, fmt::format("{} at {}", version_text(nccl().version), nccl().path)};
  } catch (const std::exception& error) {
    return {false, error.what()};
  }
}

std::string error_text(const NcclFunctions& functions, ncclResult_t result, ncclComm_t communicator) {
  const char* text = functions.get_error_string(result);
  const char* last = functions.get_last_error(communicator);
  const std::string words = text == nullptr ? fmt::format("NCCL error {}", result) : text;
  return last == nullptr || *last == '\0' ? words : fmt::format("{}: {}", words, last);
}

}  // namespace qkv::parallel
