// Which of a layer's query heads a rank of context parallelism has.
#pragma once

#include "qkv/context_parallel.hpp"

namespace qkv::api {

// Heads [begin, end) of all.
struct RankHeads {
  int32_t begin, end;
  int32_t count() const { return end - begin; }
};

// Throws where ranks have heads of their own, and not all of them as many. `name`: of the number of heads.
void check_heads(const char* name, int32_t num_heads, StateExchange exchange, int32_t num_ranks);

RankHeads heads_of_rank(int32_t num_heads, StateExchange exchange, const Shard& shard);

}  // namespace qkv::api
