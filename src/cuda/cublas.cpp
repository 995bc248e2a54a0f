#include "cuda/cublas.hpp"

#include <fmt/format.h>

#include <optional>

#include "core/checks.hpp"
#include "jit/nvrtc_library.hpp"

namespace qkv::cuda {
namespace {

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
    if (auto found = jit::open_in(place, kFiles, reasons, open_file)) return *found;
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
