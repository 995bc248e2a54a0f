// The functions of qkv.h: each converts, calls its C++ namesake and turns an exception into a status. Nothing is thrown
// across the boundary, and nothing that a caller can hand over as NULL is read unchecked.
#include <algorithm>
#include <functional>
#include <new>

#include "api/c_types.hpp"
#include "qkv/qkv.hpp"

using namespace qkv;       // NOLINT(google-build-using-namespace): the definitions below are namesakes outside of it
using namespace qkv::api;  // NOLINT(google-build-using-namespace)

struct qkv_attention {
  Attention attention;
};

struct qkv_plan {
  Plan plan;
};

struct qkv_planner {
  Planner planner;
};

namespace {

struct LastError {
  qkv_status status = QKV_OK;
  std::string message, argument, value, allowed;
};

LastError& last_error() {
  thread_local LastError error;
  return error;
}

qkv_status keep(qkv_status status, const Error& error) noexcept {
  LastError& last = last_error();
  try {
    last = {status, error.what(), error.argument(), error.value(), error.allowed()};
  } catch (...) {  // no memory for the sentence; the message of this status needs none
    last.status = QKV_OUT_OF_MEMORY;
  }
  return last.status;
}

qkv_status keep_out_of_memory() noexcept {
  LastError& last = last_error();
  last.status = QKV_OUT_OF_MEMORY;
  return last.status;
}

// What part of the last error is said where there is no memory to say it.
const char* part(const std::string LastError::*member, const char* without_memory) {
  const LastError& last = last_error();
  return last.status == QKV_OUT_OF_MEMORY ? without_memory : (last.*member).c_str();
}

template <class Handle, class Value>
qkv_status read_plan(const qkv_plan* plan, Value* value, const char* name, Handle read) noexcept {
  return guarded([&] { required(value, name) = (required(plan, "plan").plan.*read)(); });
}

struct OperandCopy {
  const std::vector<int32_t>& from;
  int32_t* to;
  const char* name;
};

// All are checked before any is written.
void copy_operands(std::initializer_list<OperandCopy> operands, int64_t num_tokens) {
  for (const auto& [from, to, name] : operands) {
    if (static_cast<int64_t>(from.size()) != num_tokens) {
      refuse("num_tokens", num_tokens, fmt::format("{}, the last of query_start_loc", from.size()),
             ErrorCode::mismatch);
    }
    if (num_tokens != 0) required(to, name);
  }
  for (const auto& [from, to, name] : operands) std::copy(from.begin(), from.end(), to);
}

void call_body(void* body, int64_t i) { (*static_cast<const std::function<void(int64_t)>*>(body))(i); }

}  // namespace

namespace qkv::api {

qkv_status keep_current_exception() noexcept {
  try {
    try {
      throw;
    } catch (const Error& error) {
      return keep(to_c(error.code()), error);
    } catch (const std::bad_alloc&) {
      return keep_out_of_memory();
    } catch (const std::exception& error) {
      return keep(QKV_INTERNAL, Error(ErrorCode::internal, "qkv", error.what(), "no such exception: please report it"));
    } catch (...) {
      return keep(QKV_INTERNAL, Error(ErrorCode::internal, "qkv", "an exception of unknown type",
                                      "exceptions of the library only: does the host's parallel_for throw?"));
    }
  } catch (...) {
    return keep_out_of_memory();
  }
}

void copy_text(const std::string& source, char* text, size_t capacity, size_t* needed) {
  if (capacity != 0) {
    required(text, "text");
    size_t length = std::min(source.size(), capacity - 1);
    // Never half a UTF-8 character: names and values in a message may be the caller's own.
    const auto continues = [&](size_t at) { return (static_cast<unsigned char>(source[at]) & 0xC0) == 0x80; };
    while (length > 0 && length < source.size() && continues(length)) --length;
    std::copy_n(source.data(), length, text);
    text[length] = '\0';
  }
  if (needed != nullptr) *needed = source.size() + 1;
}

}  // namespace qkv::api

// --- status ---

const char* qkv_status_name(qkv_status status) {
  if (status == QKV_OK) return "ok";
  if (status == QKV_OUT_OF_MEMORY) return "out_of_memory";
  for (const ErrorCode code : {ErrorCode::invalid_argument, ErrorCode::mismatch, ErrorCode::unsupported,
                               ErrorCode::unavailable, ErrorCode::internal}) {
    if (to_c(code) == status) return to_string(code).data();
  }
  return "unknown";
}

qkv_status qkv_last_error_status() { return last_error().status; }
const char* qkv_last_error_message() {
  return part(&LastError::message, "memory: got none; allowed: enough for the call");
}
const char* qkv_last_error_argument() { return part(&LastError::argument, "memory"); }
const char* qkv_last_error_value() { return part(&LastError::value, "none"); }
const char* qkv_last_error_allowed() { return part(&LastError::allowed, "enough for the call"); }

// --- tensors and layers ---

qkv_tensor qkv_tensor_contiguous(const void* data, qkv_dtype dtype, int32_t rank, const int64_t* shape) {
  qkv_tensor view{};
  view.data = const_cast<void*>(data);  // NOLINT(cppcoreguidelines-pro-type-const-cast): inputs are only read
  view.dtype = dtype;
  view.rank = shape != nullptr && rank != 0 ? rank : -1;  // refused where it is used; 0 would mean "not given"
  if (view.rank < 1 || view.rank > QKV_MAX_RANK) return view;
  int64_t step = 1;
  for (int32_t axis = rank - 1; axis >= 0; --axis) {
    view.shape[axis] = shape[axis];
    view.stride[axis] = step;
    step *= shape[axis];
  }
  return view;
}

void qkv_layer_spec_init(qkv_layer_spec* spec, size_t struct_size) { init_sized(spec, struct_size); }
void qkv_batch_init(qkv_batch* batch, size_t struct_size) { init_sized(batch, struct_size); }
void qkv_varlen_arguments_init(qkv_varlen_arguments* arguments, size_t struct_size) {
  init_sized(arguments, struct_size);
}

qkv_status qkv_explain(const qkv_layer_spec* spec, qkv_device device, char* text, size_t capacity, size_t* needed) {
  return guarded([&] {
    const std::vector<std::string> reasons = explain(from_c(spec), from_c(device, "device"));
    copy_text(fmt::format("{}", fmt::join(reasons, "\n")), text, capacity, needed);
  });
}

qkv_status qkv_support_matrix(qkv_device_kind device, char* text, size_t capacity, size_t* needed) {
  return guarded([&] { copy_text(support_matrix(device_kind_from_c(device, "device")), text, capacity, needed); });
}

// --- masks ---

qkv_status qkv_mask_check(const char* mask) {
  return guarded([&] { mask_from_c(mask); });
}

qkv_status qkv_mask_text(const char* mask, char* text, size_t capacity, size_t* needed) {
  return guarded([&] { copy_text(mask_from_c(mask).text(), text, capacity, needed); });
}

qkv_status qkv_mask_hash(const char* mask, uint64_t* hash) {
  return guarded([&] { required(hash, "hash") = mask_from_c(mask).hash(); });
}

qkv_status qkv_fill_prefix_lm_spans(const qkv_prefix_lm_span* spans, int64_t num_spans,
                                    const qkv_tensor* query_start_loc, const qkv_tensor* seq_lens, int32_t* span_start,
                                    int32_t* span_end, int64_t num_tokens) {
  return guarded([&] {
    const PrefixLmOperands operands = fill_prefix_lm_spans(
        from_c(spans, num_spans), from_c(query_start_loc, "query_start_loc"), from_c(seq_lens, "seq_lens"));
    copy_operands({{operands.span_start, span_start, "span_start"}, {operands.span_end, span_end, "span_end"}},
                  num_tokens);
  });
}

qkv_status qkv_fill_tree(const int32_t* parents, const qkv_tensor* query_start_loc, int32_t* tree_enter,
                         int32_t* tree_leave, int64_t num_tokens) {
  return guarded([&] {
    if (num_tokens < 0) refuse("num_tokens", num_tokens, "0 or more");
    const TreeOperands operands =
        fill_tree(copy_array(parents, num_tokens, "parents"), from_c(query_start_loc, "query_start_loc"));
    copy_operands({{operands.tree_enter, tree_enter, "tree_enter"}, {operands.tree_leave, tree_leave, "tree_leave"}},
                  num_tokens);
  });
}

// --- a step ---

qkv_status qkv_kv_cache_from_interleaved(const qkv_tensor* key_value, int32_t head_dim, qkv_kv_cache* cache) {
  return guarded([&] {
    const KvCache views = KvCache::from_interleaved(from_c(key_value, "key_value"), head_dim);
    required(cache, "cache") = {to_c(views.key), to_c(views.value), {}, {}};
  });
}

qkv_status qkv_attention_create(const qkv_layer_spec* spec, qkv_device device, qkv_attention** attention) {
  return guarded([&] {
    required(attention, "attention") = nullptr;
    *attention = new qkv_attention{Attention(from_c(spec), from_c(device, "device"))};
  });
}

void qkv_attention_destroy(qkv_attention* attention) { delete attention; }

qkv_status qkv_attention_plan(const qkv_attention* attention, const qkv_batch* batch, qkv_plan** plan,
                              qkv_stream stream) {
  return guarded([&] {
    required(plan, "plan") = nullptr;
    *plan = new qkv_plan{required(attention, "attention").attention.plan(from_c(batch), {stream})};
  });
}

void qkv_plan_destroy(qkv_plan* plan) { delete plan; }

void qkv_plan_limits_init(qkv_plan_limits* limits, size_t struct_size) { init_sized(limits, struct_size); }

qkv_status qkv_attention_planner(const qkv_attention* attention, const qkv_plan_limits* limits,
                                 const qkv_tensor* workspace, qkv_planner** planner) {
  return guarded([&] {
    required(planner, "planner") = nullptr;
    *planner = new qkv_planner{
        required(attention, "attention").attention.planner(from_c(limits), from_c(workspace, "workspace"))};
  });
}

qkv_status qkv_attention_workspace_bytes(const qkv_attention* attention, const qkv_plan_limits* limits,
                                         int64_t* workspace_bytes) {
  return guarded([&] {
    required(workspace_bytes, "workspace_bytes") =
        required(attention, "attention").attention.workspace_bytes(from_c(limits));
  });
}

void qkv_planner_destroy(qkv_planner* planner) { delete planner; }

qkv_status qkv_planner_plan(qkv_planner* planner, const qkv_batch* batch, qkv_plan** plan, qkv_stream stream) {
  return guarded([&] {
    required(plan, "plan") = nullptr;
    *plan = new qkv_plan{required(planner, "planner").planner.plan(from_c(batch), {stream})};
  });
}

qkv_status qkv_planner_check(const qkv_planner* planner, qkv_stream stream) {
  return guarded([&] { required(planner, "planner").planner.check({stream}); });
}

qkv_status qkv_planner_update_block_table(qkv_planner* planner, const qkv_tensor* block_table,
                                          const qkv_tensor* slot_mapping, qkv_plan** plan, qkv_stream stream) {
  return guarded([&] {
    required(plan, "plan") = nullptr;
    *plan = new qkv_plan{required(planner, "planner")
                             .planner.update_block_table(from_c(block_table, "block_table"),
                                                         from_c(slot_mapping, "slot_mapping"), {stream})};
  });
}

qkv_status qkv_plan_num_requests(const qkv_plan* plan, int32_t* num_requests) {
  return read_plan(plan, num_requests, "num_requests", &Plan::num_requests);
}

qkv_status qkv_plan_num_tokens(const qkv_plan* plan, int64_t* num_tokens) {
  return read_plan(plan, num_tokens, "num_tokens", &Plan::num_tokens);
}

qkv_status qkv_plan_num_work_items(const qkv_plan* plan, int64_t* num_work_items) {
  return read_plan(plan, num_work_items, "num_work_items", &Plan::num_work_items);
}

qkv_status qkv_plan_workspace_bytes(const qkv_plan* plan, int64_t* workspace_bytes) {
  return read_plan(plan, workspace_bytes, "workspace_bytes", &Plan::workspace_bytes);
}

qkv_status qkv_plan_dump(const qkv_plan* plan, char* text, size_t capacity, size_t* needed) {
  return guarded([&] { copy_text(required(plan, "plan").plan.dump(), text, capacity, needed); });
}

qkv_status qkv_attention_update_cache(const qkv_attention* attention, const qkv_tensor* key, const qkv_tensor* value,
                                      const qkv_kv_cache* cache, const qkv_plan* plan, qkv_stream stream) {
  return guarded([&] {
    required(attention, "attention")
        .attention.update_cache(from_c(key, "key"), from_c(value, "value"), from_c(cache), required(plan, "plan").plan,
                                {stream});
  });
}

qkv_status qkv_attention_forward(const qkv_attention* attention, const qkv_tensor* query, const qkv_kv_cache* cache,
                                 const qkv_plan* plan, const qkv_tensor* out, const qkv_tensor* lse,
                                 const qkv_tensor* out_scale, const qkv_tensor* query_scale, qkv_stream stream) {
  return guarded([&] {
    required(attention, "attention")
        .attention.forward(from_c(query, "query"), from_c(cache), required(plan, "plan").plan, from_c(out, "out"),
                           from_c(lse, "lse"), {stream}, from_c(out_scale, "out_scale"),
                           from_c(query_scale, "query_scale"));
  });
}

qkv_status qkv_attention_forward_dense(const qkv_attention* attention, const qkv_tensor* query, const qkv_tensor* key,
                                       const qkv_tensor* value, const qkv_plan* plan, const qkv_tensor* out,
                                       const qkv_tensor* lse, const qkv_tensor* out_scale,
                                       const qkv_tensor* query_scale, const qkv_tensor* key_scale,
                                       const qkv_tensor* value_scale, qkv_stream stream) {
  return guarded([&] {
    required(attention, "attention")
        .attention.forward(from_c(query, "query"), from_c(key, "key"), from_c(value, "value"),
                           required(plan, "plan").plan, from_c(out, "out"), from_c(lse, "lse"), {stream},
                           from_c(out_scale, "out_scale"), from_c(query_scale, "query_scale"),
                           from_c(key_scale, "key_scale"), from_c(value_scale, "value_scale"));
  });
}

// --- single calls ---

qkv_status qkv_varlen_attention(const qkv_varlen_arguments* arguments) {
  return guarded([&] { varlen_attention(from_c(arguments)); });
}

qkv_status qkv_merge_states(const qkv_state* states, int64_t num_states, const qkv_tensor* out, const qkv_tensor* lse,
                            const qkv_tensor* out_scale, qkv_stream stream) {
  return guarded([&] {
    merge_states(from_c(states, num_states), from_c(out, "out"), from_c(lse, "lse"), {stream},
                 from_c(out_scale, "out_scale"));
  });
}

qkv_status qkv_quantise(const qkv_tensor* rows, const qkv_tensor* out, const qkv_tensor* scale, qkv_scale_source source,
                        const qkv_tensor* query_start_loc, qkv_stream stream) {
  return guarded([&] {
    quantise(from_c(rows, "rows"), from_c(out, "out"), from_c(scale, "scale"),
             enum_from_c(source, ScaleSource::chosen, "source"), from_c(query_start_loc, "query_start_loc"), {stream});
  });
}

qkv_status qkv_lse_from_lse2(const qkv_tensor* lse) {
  return guarded([&] { lse_from_lse2(from_c(lse, "lse")); });
}

qkv_status qkv_shard_slots(const qkv_batch* batch, int32_t page_size, const qkv_shard* shard, int64_t* slots,
                           int64_t num_slots) {
  return guarded([&] {
    const std::vector<int64_t> made = shard_slots(from_c(batch), page_size, from_c(required(shard, "shard")));
    const auto num_tokens = static_cast<int64_t>(made.size());
    if (num_slots != num_tokens) refuse("num_slots", num_slots, fmt::format("{}, the batch's new tokens", num_tokens));
    if (num_tokens > 0) std::copy(made.begin(), made.end(), &required(slots, "slots"));
  });
}

qkv_status qkv_cache_write(const qkv_tensor* key, const qkv_tensor* value, const qkv_kv_cache* cache,
                           const qkv_tensor* slot_mapping, qkv_stream stream) {
  return guarded([&] {
    cache_write(from_c(key, "key"), from_c(value, "value"), from_c(cache), from_c(slot_mapping, "slot_mapping"),
                {stream});
  });
}

// --- the library ---

const char* qkv_version() { return QKV_VERSION; }

qkv_status qkv_info(char* text, size_t capacity, size_t* needed) {
  return guarded([&] { copy_text(info(), text, capacity, needed); });
}

qkv_status qkv_set_num_threads(int32_t num_threads) {
  return guarded([&] { set_num_threads(num_threads); });
}

qkv_status qkv_num_threads(int32_t* threads) {
  return guarded([&] { required(threads, "num_threads") = num_threads(); });
}

qkv_status qkv_set_parallel_for(qkv_parallel_for run, void* context) {
  return guarded([&] {
    if (run == nullptr) return set_parallel_for({});
    set_parallel_for([run, context](int64_t n, const std::function<void(int64_t)>& body) {
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): call_body makes it const again
      run(context, n, call_body, const_cast<std::function<void(int64_t)>*>(&body));
    });
  });
}
