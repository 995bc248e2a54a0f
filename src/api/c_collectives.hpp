// The handle of ranks, which other calls of qkv.h take too.
#pragma once

#include <memory>

#include "qkv/collectives.hpp"
#include "qkv/qkv.h"

struct qkv_collectives {
  std::shared_ptr<qkv::Collectives> ranks;
};
