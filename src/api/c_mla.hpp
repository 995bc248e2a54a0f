// The handles of MLA prefill, which layers over ranks take too.
#pragma once

#include "qkv/mla_prefill.hpp"
#include "qkv/qkv.h"

struct qkv_mla_plan {
  qkv::MlaPlan plan;
};

struct qkv_projection {
  qkv::Projection projection;
};
