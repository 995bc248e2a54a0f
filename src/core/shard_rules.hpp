// What stands against a shard, whatever the layer; empty = nothing. Layers and calls over shards share it.
#pragma once

#include <vector>

#include "qkv/shard.hpp"
#include "qkv/status.hpp"

namespace qkv {

std::vector<Error> reasons_against(const Shard& shard);

}  // namespace qkv
