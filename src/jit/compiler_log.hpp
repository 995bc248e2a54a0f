// Reads the log of a compile: what ptxas says of the kernel (option -v), and what went wrong.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace qkv::jit {

struct KernelUsage {
  std::vector<std::string> entries;  // lowered names of the kernels compiled
  int32_t registers = 0;             // a thread's; the largest of the kernels
  int32_t shared_bytes = 0;          // static
  // Over the kernels and the functions that were not inlined into them.
  int32_t stack_bytes = 0;
  int32_t spill_store_bytes = 0;
  int32_t spill_load_bytes = 0;
  // Lines with a number C751x: ptxas has put wgmma instructions one after another. Such a kernel is not to be shipped.
  std::vector<std::string> serialized_wgmma;
};

KernelUsage read_usage(std::string_view log);

// One line: how many errors, and the first of them. If the log names none, how it begins.
std::string first_errors(std::string_view log);

}  // namespace qkv::jit
