// What ranks of context parallelism must have in common, compared once, when a layer is made.
#pragma once

#include "qkv/collectives.hpp"
#include "qkv/context_parallel.hpp"
#include "qkv/mla_context_parallel.hpp"

namespace qkv::api {

// Collective: what a rank's layers begin with. Throws on every rank, with the same words, where a rank differs from
// rank 0; else the part of the tokens that this rank keeps. Collectives that are not given are refused.
Shard agreed_shard(const ContextParallelSpec& spec, Collectives* collectives);
Shard agreed_shard(const MlaContextParallelSpec& spec, Collectives* collectives);

}  // namespace qkv::api
