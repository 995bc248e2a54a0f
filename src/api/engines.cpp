#include "api/engines.hpp"

#include "core/checks.hpp"
#include "cpu/engine.hpp"

namespace qkv::api {

const plan::Engine& engine_of(Device device) {
  if (device.kind != DeviceKind::cpu) {
    refuse("device", to_string(device), "cpu, the only engine of this version", ErrorCode::unsupported);
  }
  static const auto engine = cpu::make_engine();
  return *engine;
}

}  // namespace qkv::api
