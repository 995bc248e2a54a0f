#include "jit/nvrtc.hpp"

#include <fmt/format.h>
#include <time.h>

#include <algorithm>

#include "core/checks.hpp"
#include "jit/nvrtc_library.hpp"

namespace qkv::jit {
namespace {

void check_nvrtc(const Nvrtc& nvrtc, nvrtcResult result, const char* call, const std::string& name) {
  if (result == kNvrtcSuccess) return;
  refuse(call, fmt::format("{} for {}", nvrtc.get_error_string(result), name), "NVRTC_SUCCESS", ErrorCode::internal);
}

class Program {
 public:
  Program(const Nvrtc& nvrtc, const Source& source) : nvrtc_(nvrtc), source_(source) {
    std::vector<const char*> texts;
    std::vector<const char*> names;
    for (const Header& header : source.headers) {
      texts.push_back(header.text);
      names.push_back(header.name);
    }
    // The same file name for all: messages are led by the source's own.
    check(nvrtc.create_program(&program_, source.text.c_str(), "kernel.cu", static_cast<int>(texts.size()),
                               texts.data(), names.data()),
          "nvrtcCreateProgram");
  }
  ~Program() { nvrtc_.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcResult compile(bool without_cache) {
    std::vector<std::string> options = source_.options;
    if (without_cache) options.emplace_back("--no-cache");
    options.push_back("--gpu-architecture=" + source_.arch);
    options.emplace_back("--std=c++20");
    options.emplace_back("--ptxas-options=-v");  // the comma form is refused: one option each
    std::vector<const char*> texts;
    texts.reserve(options.size());
    for (const std::string& option : options) texts.push_back(option.c_str());
    return nvrtc_.compile_program(program_, static_cast<int>(texts.size()), texts.data());
  }

  std::string log() {
    size_t bytes = 0;
    check(nvrtc_.get_program_log_size(program_, &bytes), "nvrtcGetProgramLogSize");
    std::string text(bytes, '\0');
    check(nvrtc_.get_program_log(program_, text.data()), "nvrtcGetProgramLog");
    // NVRTC strings several C strings together: an error of ptxas stands behind the zero of its report.
    std::replace(text.begin(), text.end(), '\0', '\n');
    text.erase(text.find_last_not_of('\n') + 1);
    return text;
  }

  std::string cubin() {
    size_t bytes = 0;
    check(nvrtc_.get_cubin_size(program_, &bytes), "nvrtcGetCUBINSize");
    std::string code(bytes, '\0');
    check(nvrtc_.get_cubin(program_, code.data()), "nvrtcGetCUBIN");
    return code;
  }

 private:
  void check(nvrtcResult result, const char* call) { check_nvrtc(nvrtc_, result, call, source_.name); }

  const Nvrtc& nvrtc_;
  const Source& source_;
  nvrtcProgram program_ = nullptr;
};

// Where a driver is installed, recent versions of NVRTC answer from a cache of their own on disk, and then without
// ptxas' report of registers and spills. Versions without that cache refuse the option that turns it off.
bool has_own_cache(const Nvrtc& nvrtc) {
  static const bool accepts_option = [&] {
    Source nothing;
    nothing.name = "probe of --no-cache";
    nothing.text = "extern \"C\" __global__ void nothing() {}";
    nothing.arch = "sm_80";
    return Program(nvrtc, nothing).compile(true) == kNvrtcSuccess;
  }();
  return accepts_option;
}

// NVRTC compiles on the thread that calls it.
double thread_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

CompileError::CompileError(const Source& source, const std::string& failure, const std::string& compiler,
                           std::string log)
    : Error(ErrorCode::internal, source.name, fmt::format("{}, {}", failure, first_errors(log)),
            fmt::format("a kernel that {} compiles for {}", compiler, source.arch)),
      log_(std::move(log)) {}

Compiled compile(const Source& source) {
  const Nvrtc& compiler = nvrtc();
  Compiled compiled;
  Program program(compiler, source);
  const bool without_cache = has_own_cache(compiler);
  const double start = thread_cpu_seconds();
  const nvrtcResult result = program.compile(without_cache);
  compiled.seconds = thread_cpu_seconds() - start;
  compiled.log = program.log();
  // First of all: of a failed program NVRTC hands out a binary of no bytes, and calls that a success.
  if (result != kNvrtcSuccess) {
    throw CompileError(source, compiler.get_error_string(result),
                       fmt::format("NVRTC {}.{}", compiler.major, compiler.minor), std::move(compiled.log));
  }
  compiled.cubin = program.cubin();
  if (compiled.cubin.empty()) {
    refuse(source.name, "no machine code", "an architecture with a number: sm_90a, not compute_90a",
           ErrorCode::internal);
  }
  compiled.usage = read_usage(compiled.log);
  if (compiled.usage.entries.size() != 1) {
    refuse(source.name, fmt::format("{} kernels", compiled.usage.entries.size()), "one __global__ function in a text",
           ErrorCode::internal);
  }
  compiled.entry = compiled.usage.entries.front();
  return compiled;
}

}  // namespace qkv::jit
