#include "cuda/cublas.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "core/checks.hpp"
#include "jit/nvrtc_library.hpp"

namespace qkv::cuda {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFiles[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};

std::optional<Cublas> open_file(const std::string& file, std::string& reason) {
  const auto library = jit::open_library(file, reason);
  if (!library) return std::nullopt;
  Cublas found;
  found.path = library->path;
  const bool complete = jit::find_function(*library, "cublasCreate_v2", found.create) &&
                        jit::find_function(*library, "cublasDestroy_v2", found.destroy) &&
                        jit::find_function(*library, "cublasSetStream_v2", found.set_stream) &&
                        jit::find_function(*library, "cublasGemmStridedBatchedEx", found.gemm_strided_batched);
  if (complete) return found;
  reason = fmt::format("{}: lacks a function that is needed", found.path);
  return std::nullopt;
}

Cublas open_cublas() {
  std::string reasons;
  for (const jit::SearchPlace& place : jit::search_places(jit::surroundings(), "nvidia/cublas/lib")) {
    for (const char* file : kFiles) {
      const fs::path path = fs::path(place.folder) / file;
      std::error_code ignored;
      if (!place.folder.empty() && !fs::exists(path, ignored)) continue;
      std::string reason;
      if (auto found = open_file(path.string(), reason)) return *found;
      reasons += fmt::format("{}{}", reasons.empty() ? "" : "; ", reason);
    }
  }
  refuse("libcublas", reasons,
         "cuBLAS 12 or later: pip install nvidia-cublas, or a CUDA toolkit; or a Projection of your own",
         ErrorCode::unavailable);
}

}  // namespace

const Cublas& cublas() {
  static const Cublas opened = open_cublas();  // tried again after a failure
  return opened;
}

}  // namespace qkv::cuda
