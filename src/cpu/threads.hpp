// All parallel work of the CPU engine goes through parallel_for, so that a host engine can bring its own pool.
#pragma once

#include <cstdint>
#include <functional>

namespace qkv::cpu {

// Calls body(i) once for each i in [0, n), in any order and on any threads; the first exception is rethrown here.
// `work` is about how many multiply-adds all calls do together: little work stays on the calling thread, since waking
// others takes longer than it.
void parallel_for(int64_t n, int64_t work, const std::function<void(int64_t)>& body);

}  // namespace qkv::cpu
