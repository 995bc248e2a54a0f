#include "parallel/exchange.hpp"

#include "core/pieces.hpp"

namespace qkv::parallel {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Contiguous memory of [heads, tokens, dim] as [tokens, heads, dim].
Tensor head_major(const Tensor& memory, int64_t num_heads, int64_t num_tokens, int64_t dim) {
  return Tensor::strided(memory.data, memory.dtype, {num_tokens, num_heads, dim}, {dim, num_tokens * dim, 1},
                         memory.device);
}

// What travels of a head's state in one piece: its LSEs, then its outputs.
struct HeadBlock {
  HeadBlock(const ExchangeShape& shape, int64_t num_tokens)
      : lse_bytes(round_up(num_tokens * size_bytes(DType::f32), 16)),
        bytes(round_up(lse_bytes + num_tokens * shape.head_dim_v * size_bytes(shape.state_dtype()), 16)) {}

  int64_t lse_bytes;
  int64_t bytes;

  // The state of `num_heads` heads whose blocks begin at `first`.
  State state(const ExchangeShape& shape, const std::byte* first, int64_t num_heads, int64_t num_tokens,
              Device device) const {
    const DType dtype = shape.state_dtype();
    return {Tensor::strided(first + lse_bytes, dtype, {num_tokens, num_heads, shape.head_dim_v},
                            {shape.head_dim_v, bytes / size_bytes(dtype), 1}, device),
            Tensor::strided(first, DType::f32, {num_heads, num_tokens}, {bytes / size_bytes(DType::f32), 1}, device)};
  }
};

// All ranks' states of the rank's heads.
std::vector<State> received_states(const ExchangeShape& shape, const ExchangeBuffers& buffers) {
  const HeadBlock block(shape, buffers.num_tokens);
  std::vector<State> states;
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const auto* first = static_cast<const std::byte*>(buffers.received.data) + rank * shape.num_heads * block.bytes;
    states.push_back(block.state(shape, first, shape.num_heads, buffers.num_tokens, buffers.received.device));
  }
  return states;
}

// Weighed by what all ranks saw: the other ranks' states enter without their values.
std::vector<State> exchange_reduce_scatter(const ExchangeShape& shape, const ExchangeBuffers& buffers,
                                           const plan::Engine& engine, Collectives& collectives, Stream stream) {
  collectives.all_gather(buffers.context.lse, buffers.all_lse, stream);
  const int64_t num_tokens = buffers.num_tokens;
  const int64_t num_heads = shape.num_heads;
  const int64_t num_all_heads = shape.num_all_heads;
  std::vector<State> states;
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const auto* lse = static_cast<const float*>(buffers.all_lse.data) + rank * num_all_heads * num_tokens;
    states.push_back({rank == collectives.rank() ? buffers.context.out : Tensor{},
                      Tensor::contiguous(lse, DType::f32, {num_all_heads, num_tokens}, buffers.all_lse.device)});
  }
  engine.merge_states(states, buffers.context.out, buffers.joined_lse, {}, stream);
  collectives.reduce_scatter(buffers.sent, buffers.received, stream);
  const int64_t first_head = collectives.rank() * num_heads;
  return {{head_major(buffers.received, num_heads, num_tokens, shape.head_dim_v),
           buffers.joined_lse.slice(0, first_head, first_head + num_heads)}};
}

}  // namespace

ExchangeBuffers lay_out(const ExchangeShape& shape, int64_t num_tokens, const void* workspace, Device device) {
  Pieces pieces;
  const auto take = [&](DType dtype, std::initializer_list<int64_t> extents) {
    Tensor piece = Tensor::contiguous(workspace, dtype, extents, device);
    piece.data = static_cast<std::byte*>(piece.data) + pieces.add(piece.num_elements() * size_bytes(dtype));
    return piece;
  };
  const int64_t ranks = shape.num_ranks;
  const int64_t heads = shape.num_heads;
  const int64_t all_heads = shape.num_all_heads;
  ExchangeBuffers buffers;
  buffers.num_tokens = num_tokens;
  if (shape.kind != StateExchange::all_gather) {
    buffers.own_query = take(shape.query_dtype, {heads, num_tokens, shape.head_dim});
    buffers.all_queries = take(shape.query_dtype, {ranks, heads, num_tokens, shape.head_dim});
  }
  if (shape.kind == StateExchange::reduce_scatter) {
    buffers.sent = take(DType::f32, {ranks, heads, num_tokens, shape.head_dim_v});
    buffers.received = take(DType::f32, {heads, num_tokens, shape.head_dim_v});
    buffers.context = {head_major(buffers.sent, all_heads, num_tokens, shape.head_dim_v),
                       take(DType::f32, {all_heads, num_tokens})};
    buffers.all_lse = take(DType::f32, {ranks, all_heads, num_tokens});
    buffers.joined_lse = take(DType::f32, {all_heads, num_tokens});
  } else {
    const HeadBlock block(shape, num_tokens);
    const int64_t words = heads * block.bytes / size_bytes(DType::i32);
    const bool to_each_its_own = shape.kind == StateExchange::all_to_all;
    buffers.sent = to_each_its_own ? take(DType::i32, {ranks, words}) : take(DType::i32, {words});
    buffers.received = take(DType::i32, {ranks, words});
    buffers.context =
        block.state(shape, static_cast<const std::byte*>(buffers.sent.data), all_heads, num_tokens, device);
  }
  buffers.new_tokens = {take(DType::f32, {num_tokens, heads, shape.head_dim_v}), take(DType::f32, {heads, num_tokens})};
  buffers.bytes = pieces.end();
  return buffers;
}

Tensor gather_queries(const ExchangeShape& shape, const Tensor& query, const plan::GatherPlan& rows,
                      const ExchangeBuffers& buffers, const plan::Engine& engine, Collectives& collectives,
                      Stream stream) {
  if (shape.kind == StateExchange::all_gather) return query;
  const int64_t num_tokens = buffers.num_tokens;
  const Tensor page = Tensor::strided(query.data, query.dtype, {1, num_tokens, shape.num_heads, shape.head_dim},
                                      {0, query.stride[0], query.stride[1], query.stride[2]}, query.device);
  engine.gather(page, rows, head_major(buffers.own_query, shape.num_heads, num_tokens, shape.head_dim), {}, stream);
  collectives.all_gather(buffers.own_query, buffers.all_queries, stream);
  return head_major(buffers.all_queries, shape.num_all_heads, num_tokens, shape.head_dim);
}

std::vector<State> exchange_states(const ExchangeShape& shape, const ExchangeBuffers& buffers,
                                   const plan::Engine& engine, Collectives& collectives, Stream stream) {
  switch (shape.kind) {
    case StateExchange::all_to_all:
      collectives.all_to_all(buffers.sent, buffers.received, stream);
      return received_states(shape, buffers);
    case StateExchange::all_gather:
      collectives.all_gather(buffers.sent, buffers.received, stream);
      return received_states(shape, buffers);
    case StateExchange::reduce_scatter:
      break;
  }
  return exchange_reduce_scatter(shape, buffers, engine, collectives, stream);
}

}  // namespace qkv::parallel
