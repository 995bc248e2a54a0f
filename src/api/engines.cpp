#include "api/engines.hpp"

#include <map>
#include <memory>
#include <mutex>

#include "cpu/engine.hpp"
#include "cuda/engine.hpp"

namespace qkv::api {

const plan::Engine& engine_of(Device device) {
  static const auto cpu_engine = cpu::make_engine();
  if (device.kind == DeviceKind::cpu) return *cpu_engine;
  static std::mutex mutex;
  static std::map<int32_t, std::unique_ptr<plan::Engine>> cuda_engines;
  const std::lock_guard lock(mutex);
  auto found = cuda_engines.find(device.index);
  if (found == cuda_engines.end()) found = cuda_engines.emplace(device.index, cuda::make_engine(device.index)).first;
  return *found->second;
}

}  // namespace qkv::api
