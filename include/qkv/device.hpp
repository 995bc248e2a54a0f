// What the library runs on, and the caller's say in it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "qkv/export.hpp"

namespace qkv {

// Instruction sets compiled in that this CPU has, best first, and the one in use. QKV_FORCE=<name> picks one; a name
// that is not in the list is an error at the first use.
QKV_EXPORT std::vector<std::string> instruction_sets();
QKV_EXPORT std::string instruction_set_in_use();

// A CUstream or cudaStream_t of the caller's, on which a call's work on a GPU is ordered; the default is CUDA's default
// stream. The CPU engine ignores it: its calls return when the work is done.
struct Stream {
  void* handle = nullptr;
};

// Threads of the CPU engine. 0 (the default) = QKV_THREADS, else all that the process may use. Results do not depend
// on it, bit for bit.
QKV_EXPORT void set_num_threads(int32_t num_threads);
QKV_EXPORT int32_t num_threads();

// Brings the host's own thread pool: run(n, body) must call body(i) once for each i in [0, n), in any order, on any
// threads, and return when all are done. An empty function restores OpenMP.
using ParallelFor = std::function<void(int64_t n, const std::function<void(int64_t)>& body)>;
QKV_EXPORT void set_parallel_for(ParallelFor run);

QKV_EXPORT std::string version();
// Everything above and the environment names that are set, a line each. Never fails.
QKV_EXPORT std::string info();

}  // namespace qkv
