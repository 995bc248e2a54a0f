// Queries go to where the keys are, states come back to where the queries came from. Everything travels head-major,
// [heads, tokens, dim]: then the heads of all ranks, one rank after another, are one strided tensor, and nothing has to
// be packed on either side.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/engine.hpp"
#include "qkv/collectives.hpp"
#include "qkv/context_parallel.hpp"
#include "qkv/ops.hpp"

namespace qkv::parallel {

struct ExchangeShape {
  int32_t num_ranks;
  int32_t num_heads;      // of a rank
  int32_t num_all_heads;  // of the layer
  int32_t head_dim, head_dim_v;
  DType query_dtype;
  StateExchange kind;

  // Of a rank's outputs over its part of the context.
  DType state_dtype() const { return kind == StateExchange::reduce_scatter ? DType::f32 : query_dtype; }
};

// The tensors of one step, in the caller's workspace.
struct ExchangeBuffers {
  int64_t num_tokens = 0;
  Tensor own_query, all_queries;  // [heads, num_tokens, head_dim], where queries go round
  State context;                  // [num_tokens, num_all_heads, head_dim_v]: over the rank's part
  Tensor sent, received;          // by the exchange of outputs: `sent` is the memory of `context`
  Tensor all_lse;                 // reduce_scatter: f32 [num_ranks, num_all_heads, num_tokens]
  Tensor joined_lse;              // reduce_scatter: f32 [num_all_heads, num_tokens]
  State new_tokens;               // f32 [num_tokens, num_heads, head_dim_v]
  int64_t bytes = 0;
};

ExchangeBuffers lay_out(const ExchangeShape& shape, int64_t num_tokens, const void* workspace, Device device);

// The queries of all heads [num_tokens, num_all_heads, head_dim]. `rows`: a gather of the tokens, as one page.
Tensor gather_queries(const ExchangeShape& shape, const Tensor& query, const plan::GatherPlan& rows,
                      const ExchangeBuffers& buffers, const plan::Engine& engine, Collectives& collectives,
                      Stream stream);

// States of the rank's heads that together are the whole context's, from what each rank left in buffers.context.
std::vector<State> exchange_states(const ExchangeShape& shape, const ExchangeBuffers& buffers,
                                   const plan::Engine& engine, Collectives& collectives, Stream stream);

}  // namespace qkv::parallel
