// Text in, machine code of one kernel out.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "jit/compiler_log.hpp"
#include "qkv/status.hpp"

namespace qkv::jit {

// A file that #include "name" finds. There is no include folder: device code includes these and nothing else.
struct Header {
  const char* name;
  const char* text;
};

struct Source {
  std::string name;                  // words for people: log lines and errors
  std::string text;                  // exactly one __global__ function
  std::span<const Header> headers;   // embedded in the library: they outlive every Source
  std::string arch;                  // "sm_90a"
  std::vector<std::string> options;  // besides arch, C++20 and -v for ptxas
};

// The same code, whatever it is called.
inline bool operator==(const Source& a, const Source& b) {
  return a.text == b.text && a.arch == b.arch && a.options == b.options && a.headers.data() == b.headers.data();
}

struct Compiled {
  std::string cubin;  // bytes; never empty
  std::string entry;  // the kernel's lowered name
  KernelUsage usage;
  std::string log;
  double seconds = 0;  // of CPU
};

class CompileError : public Error {
 public:
  CompileError(const Source& source, const std::string& failure, const std::string& compiler, std::string log);
  // All that the compiler said; what() has the first errors.
  const std::string& log() const { return log_; }

 private:
  std::string log_;
};

// Throws CompileError if the text does not compile, unavailable without NVRTC. May be called from many threads at once.
Compiled compile(const Source& source);

}  // namespace qkv::jit
