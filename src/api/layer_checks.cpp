#include "api/layer_checks.hpp"

#include <fmt/format.h>

#include "spec/rules.hpp"

namespace qkv::api {

void throw_all(const std::vector<Error>& reasons) {
  const Error& first = reasons.front();
  std::string allowed = first.allowed();
  for (size_t i = 1; i < reasons.size(); ++i) allowed += fmt::format("; also {}", reasons[i].what());
  throw Error(first.code(), first.argument(), first.value(), std::move(allowed));
}

LayerSpec checked_layer(LayerSpec spec, Device device) {
  if (const std::vector<Error> reasons = spec::reasons_against(spec, device); !reasons.empty()) throw_all(reasons);
  return spec;
}

}  // namespace qkv::api
