// What ranks of context parallelism must have in common, compared once, when a layer is made.
#pragma once

#include "qkv/collectives.hpp"
#include "qkv/context_parallel.hpp"
#include "qkv/mla_context_parallel.hpp"

namespace qkv::api {

// Collective. Throws on every rank, with the same words, where a rank differs from rank 0.
void check_ranks_agree(const ContextParallelSpec& spec, Collectives& collectives);
void check_ranks_agree(const MlaContextParallelSpec& spec, Collectives& collectives);

}  // namespace qkv::api
