// Everything. qkv/dlpack.hpp is apart: it needs the DLPack header.
#pragma once

#include "qkv/attention.hpp"
#include "qkv/batch.hpp"
#include "qkv/compile.hpp"
#include "qkv/cuda.hpp"
#include "qkv/device.hpp"
#include "qkv/kernel_cache.hpp"
#include "qkv/layer.hpp"
#include "qkv/mask.hpp"
#include "qkv/ops.hpp"
#include "qkv/plan.hpp"
#include "qkv/planner.hpp"
#include "qkv/reference.hpp"
#include "qkv/status.hpp"
#include "qkv/tensor.hpp"
#include "qkv/warmup.hpp"
