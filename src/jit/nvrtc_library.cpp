#include "jit/nvrtc_library.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "core/checks.hpp"
#include "core/environment.hpp"

namespace qkv::jit {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFiles[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
constexpr std::pair<int, int> kOldest = {12, 3};

const char* missing_symbol(const Library& library, NvrtcFunctions& f) {
  const char* missing = nullptr;
  const auto find = [&](const char* symbol, auto& function) {
    if (!find_function(library, symbol, function) && missing == nullptr) missing = symbol;
  };
  find("nvrtcGetErrorString", f.get_error_string);
  find("nvrtcVersion", f.version);
  find("nvrtcCreateProgram", f.create_program);
  find("nvrtcDestroyProgram", f.destroy_program);
  find("nvrtcCompileProgram", f.compile_program);
  find("nvrtcGetProgramLogSize", f.get_program_log_size);
  find("nvrtcGetProgramLog", f.get_program_log);
  find("nvrtcGetCUBINSize", f.get_cubin_size);
  find("nvrtcGetCUBIN", f.get_cubin);
  return missing;
}

// NVRTC opens its second library by bare name and without a search path of its own. Outside the loader's folders (a
// wheel) it is found only if it has been loaded before.
void load_builtins(const Nvrtc& nvrtc) {
  const fs::path file = fmt::format("libnvrtc-builtins.so.{}.{}", nvrtc.major, nvrtc.minor);
  std::string reason;  // NVRTC reports it itself, in the log of the first compile
  open_library(fs::path(nvrtc.path).parent_path() / file, reason);
}

std::optional<Nvrtc> open_file(const std::string& file, const std::string& origin, std::string& reason) {
  const auto library = open_library(file, reason);
  if (!library) return std::nullopt;
  Nvrtc nvrtc;
  nvrtc.path = library->path;
  nvrtc.origin = origin;
  if (const char* symbol = missing_symbol(*library, nvrtc)) {
    reason = fmt::format("{}: has no {}", nvrtc.path, symbol);
    return std::nullopt;
  }
  nvrtc.version(&nvrtc.major, &nvrtc.minor);
  if (!is_supported_version(nvrtc.major, nvrtc.minor)) {
    reason = fmt::format("{}: version {}.{} is too old", nvrtc.path, nvrtc.major, nvrtc.minor);
    return std::nullopt;
  }
  load_builtins(nvrtc);
  return nvrtc;
}

[[noreturn]] void refuse_nvrtc(const std::string& argument, const std::string& value) {
  const std::string allowed =
      fmt::format("NVRTC {}.{} or later: pip install nvidia-cuda-nvrtc, or a CUDA toolkit, or QKV_NVRTC=<its file>",
                  kOldest.first, kOldest.second);
  refuse(argument, value, allowed, ErrorCode::unavailable);
}

// Where NVIDIA's wheels put it: the first since CUDA 13, the second before.
void add_wheels(const fs::path& site_packages, const std::string& own_wheel, const std::string& origin,
                std::vector<SearchPlace>& places) {
  for (const std::string& wheel : {std::string("nvidia/cu13/lib"), own_wheel}) {
    places.push_back({(site_packages / wheel).string(), origin});
  }
}

void add_python_environment(const fs::path& root, const std::string& own_wheel, const std::string& origin,
                            std::vector<SearchPlace>& places) {
  std::vector<fs::path> pythons;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(root / "lib", ignored)) {
    if (entry.path().filename().string().starts_with("python3")) pythons.push_back(entry.path());
  }
  std::sort(pythons.begin(), pythons.end());
  for (const auto& python : pythons) add_wheels(python / "site-packages", own_wheel, origin, places);
}

}  // namespace

Surroundings surroundings() {
  std::error_code ignored;
  return {environment("QKV_NVRTC"), environment("CUDA_HOME"), environment("VIRTUAL_ENV"), own_folder(),
          fs::current_path(ignored).string()};
}

std::vector<SearchPlace> search_places(const Surroundings& around, const std::string& own_wheel) {
  std::vector<SearchPlace> places = {{"", "the loader's search"}};
  if (around.cuda_home) {
    for (const char* lib : {"lib64", "lib"}) places.push_back({fs::path(*around.cuda_home) / lib, "CUDA_HOME"});
  }
  places.push_back({"/usr/local/cuda/lib64", "the usual toolkit"});
  // qkv as a Python package: site-packages/qkv/<this>, beside site-packages/nvidia.
  const fs::path beside = fs::path(around.own_folder).parent_path();
  if (beside.filename() == "site-packages" || beside.filename() == "dist-packages") {
    add_wheels(beside, own_wheel, "beside the qkv package", places);
  }
  if (around.virtual_env) add_python_environment(*around.virtual_env, own_wheel, "VIRTUAL_ENV", places);
  if (!around.working_folder.empty()) {
    add_python_environment(fs::path(around.working_folder) / ".venv", own_wheel, ".venv of the working folder", places);
  }
  return places;
}

bool is_supported_version(int major, int minor) { return std::pair(major, minor) >= kOldest; }

Nvrtc open_nvrtc(const Surroundings& around) {
  if (!around.named_file) return open_nvrtc_in(search_places(around));
  std::string reason;
  if (auto nvrtc = open_file(*around.named_file, "QKV_NVRTC", reason)) return *nvrtc;
  refuse_nvrtc("QKV_NVRTC", fmt::format("{} ({})", *around.named_file, reason));
}

Nvrtc open_nvrtc_in(const std::vector<SearchPlace>& places) {
  std::string reasons;
  std::string searched;
  for (const SearchPlace& place : places) {
    const auto open_here = [&](const std::string& file, std::string& reason) {
      return open_file(file, place.origin, reason);
    };
    if (auto nvrtc = open_in(place, kFiles, reasons, open_here)) return *nvrtc;
    searched += fmt::format("{}{}", searched.empty() ? "" : ", ", place.folder.empty() ? place.origin : place.folder);
  }
  refuse_nvrtc("libnvrtc", fmt::format("none in {} ({})", searched, reasons));
}

const Nvrtc& nvrtc() {
  static const Nvrtc opened = open_nvrtc(surroundings());  // tried again after a failure
  return opened;
}

Probe probe_nvrtc() {
  try {
    const Nvrtc& found = nvrtc();
    return {true, fmt::format("{}.{} at {} ({})", found.major, found.minor, found.path, found.origin)};
  } catch (const std::exception& error) {
    return {false, error.what()};
  }
}

}  // namespace qkv::jit
