#include "api/rank_heads.hpp"

#include "core/checks.hpp"

namespace qkv::api {

void check_heads(const char* name, int32_t num_heads, StateExchange exchange, int32_t num_ranks) {
  if (exchange == StateExchange::all_gather || num_heads % num_ranks == 0) return;
  refuse(name, num_heads,
         fmt::format("a multiple of {}, the number of ranks; or exchange all_gather, where every rank has all heads",
                     num_ranks));
}

RankHeads heads_of_rank(int32_t num_heads, StateExchange exchange, const Shard& shard) {
  if (exchange == StateExchange::all_gather) return {0, num_heads};
  const int32_t count = num_heads / shard.num_ranks;
  return {shard.rank * count, (shard.rank + 1) * count};
}

}  // namespace qkv::api
