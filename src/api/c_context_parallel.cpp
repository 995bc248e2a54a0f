// The functions of qkv.h for context parallelism.
#include "api/c_collectives.hpp"
#include "api/c_types.hpp"
#include "qkv/context_parallel.hpp"

using namespace qkv;       // NOLINT(google-build-using-namespace): the definitions below are namesakes outside of it
using namespace qkv::api;  // NOLINT(google-build-using-namespace)

struct qkv_context_parallel {
  ContextParallel attention;
};

struct qkv_parallel_plan {
  ContextParallelPlan plan;
};

struct qkv_parallel_planner {
  ContextParallelPlanner planner;
};

namespace {

const ContextParallel& layer_of(const qkv_context_parallel* attention) {
  return required(attention, "attention").attention;
}

}  // namespace

qkv_status qkv_context_parallel_create(const qkv_layer_spec* layer, int32_t interleave_size,
                                       qkv_state_exchange exchange, const qkv_collectives* ranks,
                                       qkv_context_parallel** attention) {
  return create(attention, "attention", [&] {
    const ContextParallelSpec spec{from_c(layer), interleave_size,
                                   enum_from_c(exchange, StateExchange::all_gather, "exchange")};
    return ContextParallel(spec, required(ranks, "ranks").ranks);
  });
}

void qkv_context_parallel_destroy(qkv_context_parallel* attention) { delete attention; }

qkv_status qkv_context_parallel_shard(const qkv_context_parallel* attention, qkv_shard* shard) {
  return guarded([&] { required(shard, "shard") = to_c(layer_of(attention).shard()); });
}

qkv_status qkv_context_parallel_num_heads(const qkv_context_parallel* attention, int32_t* num_heads) {
  return guarded([&] { required(num_heads, "num_heads") = layer_of(attention).num_heads(); });
}

qkv_status qkv_context_parallel_workspace_bytes(const qkv_context_parallel* attention, int64_t max_tokens,
                                                int64_t* workspace_bytes) {
  return guarded(
      [&] { required(workspace_bytes, "workspace_bytes") = layer_of(attention).workspace_bytes(max_tokens); });
}

qkv_status qkv_context_parallel_plan(const qkv_context_parallel* attention, const qkv_batch* batch,
                                     qkv_parallel_plan** plan, qkv_stream stream) {
  return create(plan, "plan", [&] { return layer_of(attention).plan(from_c(batch), {stream}); });
}

void qkv_parallel_plan_destroy(qkv_parallel_plan* plan) { delete plan; }

qkv_status qkv_parallel_plan_exchanges(const qkv_parallel_plan* plan, int32_t* exchanges) {
  return guarded([&] { required(exchanges, "exchanges") = required(plan, "plan").plan.exchanges() ? 1 : 0; });
}

qkv_status qkv_parallel_plan_workspace_bytes(const qkv_parallel_plan* plan, int64_t* workspace_bytes) {
  return guarded([&] { required(workspace_bytes, "workspace_bytes") = required(plan, "plan").plan.workspace_bytes(); });
}

qkv_status qkv_context_parallel_planner(const qkv_context_parallel* attention, const qkv_plan_limits* limits,
                                        qkv_parallel_planner** planner) {
  return create(planner, "planner", [&] { return layer_of(attention).planner(from_c(limits)); });
}

void qkv_parallel_planner_destroy(qkv_parallel_planner* planner) { delete planner; }

qkv_status qkv_parallel_planner_plan(qkv_parallel_planner* planner, const qkv_batch* batch, qkv_parallel_plan** plan,
                                     qkv_stream stream) {
  return create(plan, "plan", [&] { return required(planner, "planner").planner.plan(from_c(batch), {stream}); });
}

qkv_status qkv_parallel_planner_check(const qkv_parallel_planner* planner, qkv_stream stream) {
  return guarded([&] { required(planner, "planner").planner.check({stream}); });
}

qkv_status qkv_context_parallel_update_cache(const qkv_context_parallel* attention, const qkv_tensor* key,
                                             const qkv_tensor* value, const qkv_kv_cache* cache,
                                             const qkv_parallel_plan* plan, qkv_stream stream) {
  return guarded([&] {
    layer_of(attention).update_cache(from_c(key, "key"), from_c(value, "value"), from_c(cache),
                                     required(plan, "plan").plan, {stream});
  });
}

qkv_status qkv_context_parallel_forward(const qkv_context_parallel* attention, const qkv_tensor* query,
                                        const qkv_tensor* key, const qkv_tensor* value, const qkv_kv_cache* cache,
                                        const qkv_parallel_plan* plan, const qkv_tensor* workspace,
                                        const qkv_tensor* out, const qkv_tensor* lse, const qkv_tensor* out_scale,
                                        const qkv_stream* new_tokens_stream, qkv_stream stream) {
  return guarded([&] {
    const Stream beside{new_tokens_stream == nullptr ? stream : *new_tokens_stream};
    layer_of(attention).forward(from_c(query, "query"), from_c(key, "key"), from_c(value, "value"), from_c(cache),
                                required(plan, "plan").plan, from_c(workspace, "workspace"), from_c(out, "out"),
                                from_c(lse, "lse"), {stream}, from_c(out_scale, "out_scale"), beside);
  });
}
