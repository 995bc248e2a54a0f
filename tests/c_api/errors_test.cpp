// What a C caller can get wrong: refused with a code and a sentence in four parts, never a crash or an exception.
#include <cstddef>
#include <cstring>
#include <functional>
#include <new>
#include <set>
#include <thread>

#include "api/c_types.hpp"
#include "c_api/c_structs.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::CSpec;
using testing::expect_ok;
using testing::layer_of;
using testing::to_c;
using testing::view;

constexpr qkv_device kCpu = {QKV_CPU, 0};

void expect_failed(qkv_status got, qkv_status expected, const std::string& argument) {
  EXPECT_STREQ(qkv_status_name(got), qkv_status_name(expected)) << qkv_last_error_message();
  EXPECT_EQ(qkv_last_error_status(), got);
  EXPECT_EQ(qkv_last_error_argument(), argument) << qkv_last_error_message();
  EXPECT_STRNE(qkv_last_error_value(), "");
  EXPECT_STRNE(qkv_last_error_allowed(), "");
  EXPECT_EQ(std::string(qkv_last_error_message()),
            argument + ": got " + qkv_last_error_value() + "; allowed: " + qkv_last_error_allowed());
}

qkv_status create(const qkv_layer_spec* spec) {
  qkv_attention* attention = nullptr;
  const qkv_status status = qkv_attention_create(spec, kCpu, &attention);
  EXPECT_EQ(attention == nullptr, status != QKV_OK);
  qkv_attention_destroy(attention);
  return status;
}

// --- the two lists of codes ---

TEST(c_api_errors, every_error_code_has_a_status_of_its_name) {
  std::set<qkv_status> statuses;
  for (int32_t number = 0; to_string(static_cast<ErrorCode>(number)) != "unknown"; ++number) {
    const auto code = static_cast<ErrorCode>(number);
    EXPECT_EQ(qkv_status_name(api::to_c(code)), to_string(code));
    EXPECT_TRUE(statuses.insert(api::to_c(code)).second) << to_string(code);
  }
  EXPECT_EQ(statuses,
            (std::set<qkv_status>{QKV_INVALID_ARGUMENT, QKV_MISMATCH, QKV_UNSUPPORTED, QKV_UNAVAILABLE, QKV_INTERNAL}));
  // And no status has a name that is not of a code, save for the two that C++ does not need.
  for (qkv_status status = -10; status < 1000; ++status) {
    if (statuses.count(status) != 0 || status == QKV_OK || status == QKV_OUT_OF_MEMORY) continue;
    EXPECT_STREQ(qkv_status_name(status), "unknown");
  }
  EXPECT_STREQ(qkv_status_name(QKV_OK), "ok");
  EXPECT_STREQ(qkv_status_name(QKV_OUT_OF_MEMORY), "out_of_memory");
}

// --- sentences ---

TEST(c_api_errors, four_parts_are_those_of_the_cpp_error) {
  LayerSpec layer = layer_of(8, 2, 7);
  try {
    Attention{layer};
    FAIL() << "not refused";
  } catch (const Error& error) {
    const CSpec spec(layer);
    expect_failed(create(&spec.spec), QKV_INVALID_ARGUMENT, "head_dim");
    EXPECT_STREQ(qkv_last_error_message(), error.what());
    EXPECT_EQ(qkv_last_error_argument(), error.argument());
    EXPECT_EQ(qkv_last_error_value(), error.value());
    EXPECT_EQ(qkv_last_error_allowed(), error.allowed());
  }
}

TEST(c_api_errors, calls_that_succeed_leave_the_sentence_alone) {
  expect_failed(qkv_mask_check("causal &"), QKV_INVALID_ARGUMENT, "mask");
  const std::string message = qkv_last_error_message();
  expect_ok(qkv_mask_check("causal"));
  EXPECT_EQ(qkv_last_error_message(), message);
}

TEST(c_api_errors, each_thread_has_its_own_sentence) {
  expect_failed(qkv_mask_check(nullptr), QKV_INVALID_ARGUMENT, "mask");
  std::thread([] {
    EXPECT_EQ(qkv_last_error_status(), QKV_OK);
    EXPECT_STREQ(qkv_last_error_message(), "");
    expect_failed(qkv_set_num_threads(-1), QKV_INVALID_ARGUMENT, "num_threads");
  }).join();
  EXPECT_STREQ(qkv_last_error_argument(), "mask");
}

void pool_without_memory(void*, int64_t, qkv_body, void*) { throw std::bad_alloc(); }
void pool_that_throws_a_number(void*, int64_t, qkv_body, void*) { throw 7; }  // NOLINT
void pool_that_throws_a_sentence(void*, int64_t, qkv_body, void*) { throw std::runtime_error("the pool is closed"); }

TEST(c_api_errors, no_exception_crosses_the_boundary) {
  // Enough rows that the pool is asked at all.
  std::vector<float> data(size_t{4096} * 64, 1.0F), lse(4096);
  const qkv_state state = {to_c(view(data, {4096, 1, 64})), to_c(view(lse, {1, 4096}))};
  const auto merge = [&](qkv_parallel_for pool) {
    expect_ok(qkv_set_parallel_for(pool, nullptr));
    const qkv_status status = qkv_merge_states(&state, 1, &state.out, nullptr, nullptr, nullptr);
    expect_ok(qkv_set_parallel_for(nullptr, nullptr));
    return status;
  };
  expect_failed(merge(pool_without_memory), QKV_OUT_OF_MEMORY, "memory");
  expect_failed(merge(pool_that_throws_a_number), QKV_INTERNAL, "qkv");
  expect_failed(merge(pool_that_throws_a_sentence), QKV_INTERNAL, "qkv");
  EXPECT_STREQ(qkv_last_error_value(), "the pool is closed");
  expect_ok(merge(nullptr));
}

// --- null pointers ---

TEST(c_api_errors, null_handles_and_pointers_are_refused_by_name) {
  const CSpec spec(layer_of(2, 1, 8));
  const auto attention = testing::create(spec.spec);
  const std::vector<int32_t> starts = {0, 1}, lengths = {1};
  Batch batch;
  batch.query_start_loc = view(starts);
  batch.seq_lens = view(lengths);
  const testing::CBatch c_batch(batch);
  const auto plan = testing::make_plan(attention, c_batch.batch);
  const std::vector<float> data(16);
  const qkv_tensor query = to_c(view(data, {1, 2, 8})), key = to_c(view(data, {1, 1, 8}));
  const qkv_kv_cache cache = {key, key, {}, {}};
  qkv_attention* new_attention = nullptr;
  qkv_plan* new_plan = nullptr;
  const auto refused = [](qkv_status status, const char* argument) {
    expect_failed(status, QKV_INVALID_ARGUMENT, argument);
  };
  refused(qkv_attention_create(nullptr, kCpu, &new_attention), "spec");
  refused(qkv_attention_create(&spec.spec, kCpu, nullptr), "attention");
  refused(qkv_attention_plan(nullptr, &c_batch.batch, &new_plan, nullptr), "attention");
  refused(qkv_attention_plan(attention.get(), nullptr, &new_plan, nullptr), "batch");
  refused(qkv_attention_plan(attention.get(), &c_batch.batch, nullptr, nullptr), "plan");
  qkv_planner* new_planner = nullptr;
  qkv_plan_limits limits;
  qkv_plan_limits_init(&limits, sizeof limits);
  refused(qkv_attention_planner(nullptr, &limits, nullptr, &new_planner), "attention");
  refused(qkv_attention_planner(attention.get(), nullptr, nullptr, &new_planner), "limits");
  refused(qkv_attention_planner(attention.get(), &limits, nullptr, nullptr), "planner");
  refused(qkv_attention_planner(attention.get(), &limits, nullptr, &new_planner), "limits.max_requests");
  refused(qkv_planner_plan(nullptr, &c_batch.batch, &new_plan, nullptr), "planner");
  refused(qkv_planner_check(nullptr, nullptr), "planner");
  refused(qkv_planner_update_block_table(nullptr, nullptr, nullptr, &new_plan, nullptr), "planner");
  refused(qkv_attention_update_cache(nullptr, &key, &key, &cache, plan.get(), nullptr), "attention");
  refused(qkv_attention_update_cache(attention.get(), &key, &key, nullptr, plan.get(), nullptr), "cache");
  refused(qkv_attention_update_cache(attention.get(), &key, &key, &cache, nullptr, nullptr), "plan");
  refused(qkv_attention_forward(nullptr, &query, &cache, plan.get(), &query, nullptr, nullptr, nullptr, nullptr),
          "attention");
  refused(
      qkv_attention_forward(attention.get(), &query, nullptr, plan.get(), &query, nullptr, nullptr, nullptr, nullptr),
      "cache");
  refused(qkv_attention_forward(attention.get(), &query, &cache, nullptr, &query, nullptr, nullptr, nullptr, nullptr),
          "plan");
  const auto forward = [&](const qkv_tensor* q, const qkv_tensor* k, const qkv_tensor* v, const qkv_tensor* out) {
    return qkv_attention_forward_dense(attention.get(), q, k, v, plan.get(), out, nullptr, nullptr, nullptr, nullptr,
                                       nullptr, nullptr);
  };
  expect_ok(forward(&query, &key, &key, &query));
  refused(forward(nullptr, &key, &key, &query), "query");
  refused(forward(&query, nullptr, &key, &query), "key");
  refused(forward(&query, &key, nullptr, &query), "value");
  refused(forward(&query, &key, &key, nullptr), "out");
  refused(qkv_attention_forward_dense(nullptr, &query, &key, &key, plan.get(), &query, nullptr, nullptr, nullptr,
                                      nullptr, nullptr, nullptr),
          "attention");
  refused(qkv_attention_forward_dense(attention.get(), &query, &key, &key, nullptr, &query, nullptr, nullptr, nullptr,
                                      nullptr, nullptr, nullptr),
          "plan");

  int32_t number = 0;
  int64_t size = 0;
  refused(qkv_plan_num_requests(nullptr, &number), "plan");
  refused(qkv_plan_num_requests(plan.get(), nullptr), "num_requests");
  refused(qkv_plan_num_tokens(nullptr, &size), "plan");
  refused(qkv_plan_num_work_items(plan.get(), nullptr), "num_work_items");
  refused(qkv_plan_workspace_bytes(nullptr, &size), "plan");
  refused(qkv_plan_dump(nullptr, nullptr, 0, nullptr), "plan");
  refused(qkv_explain(nullptr, kCpu, nullptr, 0, nullptr), "spec");
  refused(qkv_explain(&spec.spec, kCpu, nullptr, 5, nullptr), "text");
  refused(qkv_info(nullptr, 5, nullptr), "text");
  refused(qkv_mask_text(nullptr, nullptr, 0, nullptr), "mask");
  refused(qkv_mask_hash("causal", nullptr), "hash");
  refused(qkv_num_threads(nullptr), "num_threads");
  refused(qkv_varlen_attention(nullptr), "arguments");
  refused(qkv_merge_states(nullptr, 2, &query, nullptr, nullptr, nullptr), "states");
  refused(qkv_lse_from_lse2(nullptr), "lse");
  refused(qkv_cache_write(&key, &key, nullptr, nullptr, nullptr), "cache");
  refused(qkv_cache_write(&key, &key, &cache, nullptr, nullptr), "slot_mapping");
  refused(qkv_shard_slots(&c_batch.batch, 16, nullptr, &size, 1), "shard");
  refused(qkv_kv_cache_from_interleaved(nullptr, 4, nullptr), "key_value");
  refused(qkv_fill_tree(nullptr, &c_batch.batch.query_start_loc, &number, &number, 1), "parents");
  refused(qkv_fill_tree(starts.data(), nullptr, &number, &number, 1), "query_start_loc");
  const int32_t root = -1;
  refused(qkv_fill_tree(&root, &c_batch.batch.query_start_loc, &number, nullptr, 1), "tree_leave");
  EXPECT_EQ(number, 0) << "written although the call failed";
  qkv_attention_destroy(nullptr);
  qkv_plan_destroy(nullptr);
}

TEST(c_api_errors, arrays_inside_structs_are_checked) {
  CSpec spec(layer_of(2, 1, 8));
  spec.spec.num_sinks = 2;
  spec.spec.sinks = nullptr;
  expect_failed(create(&spec.spec), QKV_INVALID_ARGUMENT, "sinks");
  spec.spec.num_sinks = -1;
  expect_failed(create(&spec.spec), QKV_INVALID_ARGUMENT, "num_sinks");

  const auto attention = testing::create(CSpec(layer_of(2, 1, 8)).spec);
  const std::vector<int32_t> starts = {0, 1};
  qkv_mask_operand operand = {nullptr, to_c(view(starts))};
  qkv_batch batch;
  qkv_batch_init(&batch, sizeof batch);
  batch.query_start_loc = to_c(view(starts));
  batch.mask_operands = &operand;
  batch.num_mask_operands = 1;
  qkv_plan* plan = nullptr;
  expect_failed(qkv_attention_plan(attention.get(), &batch, &plan, nullptr), QKV_INVALID_ARGUMENT,
                "mask_operands[0].name");
  operand.name = "prefix_len";
  operand.values.rank = 6;
  expect_failed(qkv_attention_plan(attention.get(), &batch, &plan, nullptr), QKV_INVALID_ARGUMENT,
                "mask_operands[prefix_len].rank");
  EXPECT_EQ(plan, nullptr);
}

// --- numbers that are no enumerator, ranks that are none ---

TEST(c_api_errors, unknown_enumerators_are_refused) {
  const auto refused = [](const char* argument, const std::function<void(qkv_layer_spec&)>& change) {
    CSpec spec(layer_of(2, 1, 8));
    change(spec.spec);
    expect_failed(create(&spec.spec), QKV_INVALID_ARGUMENT, argument);
  };
  refused("query_dtype", [](qkv_layer_spec& s) { s.query_dtype = 8; });
  refused("kv_scales", [](qkv_layer_spec& s) { s.kv_scales = 5; });
  refused("output_scales", [](qkv_layer_spec& s) { s.output_scales = 2; });
  refused("reserved", [](qkv_layer_spec& s) { s.reserved = 1; });
  refused("kv_dtype", [](qkv_layer_spec& s) { s.kv_dtype = -1; });
  refused("output_dtype", [](qkv_layer_spec& s) {
    s.has_output_dtype = 1;
    s.output_dtype = 99;
  });
  refused("type", [](qkv_layer_spec& s) { s.type = 4; });
  refused("mask", [](qkv_layer_spec& s) { s.mask = "causal &"; });
  const CSpec spec(layer_of(2, 1, 8));
  qkv_attention* attention = nullptr;
  expect_failed(qkv_attention_create(&spec.spec, {7, 0}, &attention), QKV_INVALID_ARGUMENT, "device.kind");
  expect_failed(qkv_attention_create(&spec.spec, {QKV_CUDA, 0}, &attention), QKV_UNSUPPORTED, "query_dtype");
  expect_failed(qkv_support_matrix(-1, nullptr, 0, nullptr), QKV_INVALID_ARGUMENT, "device");
}

TEST(c_api_errors, tensors_without_a_sensible_rank_are_refused) {
  const std::vector<float> data(8);
  const int64_t shape[] = {8};
  for (const int32_t rank : {-1, 0, 6, 1000000}) {
    const qkv_tensor tensor = qkv_tensor_contiguous(data.data(), QKV_F32, rank, shape);
    expect_failed(qkv_lse_from_lse2(&tensor), QKV_INVALID_ARGUMENT, "lse.rank");
  }
  qkv_tensor tensor = qkv_tensor_contiguous(data.data(), QKV_F32, 1, nullptr);
  expect_failed(qkv_lse_from_lse2(&tensor), QKV_INVALID_ARGUMENT, "lse.rank");
  tensor = qkv_tensor_contiguous(data.data(), 17, 1, shape);
  expect_failed(qkv_lse_from_lse2(&tensor), QKV_INVALID_ARGUMENT, "lse.dtype");
}

TEST(c_api_errors, tensors_of_other_devices_are_refused) {
  const std::vector<float> data(8);
  qkv_tensor tensor = to_c(view(data, {8}));
  tensor.device = {QKV_CUDA, 1};
  expect_failed(qkv_lse_from_lse2(&tensor), QKV_MISMATCH, "lse");
  EXPECT_NE(std::string(qkv_last_error_value()).find("cuda:1"), std::string::npos);
  tensor.device = {5, 0};
  expect_failed(qkv_lse_from_lse2(&tensor), QKV_INVALID_ARGUMENT, "lse.device.kind");
}

// --- structs of other versions ---

TEST(c_api_errors, a_struct_that_nobody_set_up_is_refused) {
  for (const size_t size : {size_t{0}, size_t{4}, offsetof(qkv_layer_spec, kv_dtype), size_t{5000}, ~size_t{0}}) {
    CSpec spec(layer_of(2, 1, 8));
    spec.spec.struct_size = size;
    expect_failed(create(&spec.spec), QKV_INVALID_ARGUMENT, "spec.struct_size");
  }
  const auto attention = testing::create(CSpec(layer_of(2, 1, 8)).spec);
  const qkv_batch batch{};
  qkv_plan* plan = nullptr;
  expect_failed(qkv_attention_plan(attention.get(), &batch, &plan, nullptr), QKV_INVALID_ARGUMENT, "batch.struct_size");
  const qkv_varlen_arguments arguments{};
  expect_failed(qkv_varlen_attention(&arguments), QKV_INVALID_ARGUMENT, "arguments.struct_size");
}

TEST(c_api_errors, fields_past_an_older_struct_are_not_read) {
  CSpec spec(layer_of(2, 1, 8));
  spec.spec.struct_size = offsetof(qkv_layer_spec, mask);  // as if the fields from mask on came later
  std::memset(reinterpret_cast<char*>(&spec.spec) + spec.spec.struct_size, 0xFF,
              sizeof spec.spec - spec.spec.struct_size);
  expect_ok(create(&spec.spec));
  std::vector<char> older(spec.spec.struct_size);  // its bytes and no more: AddressSanitizer watches the end
  std::memcpy(older.data(), &spec.spec, older.size());
  expect_ok(create(reinterpret_cast<const qkv_layer_spec*>(older.data())));
}

TEST(c_api_errors, older_limits_are_read_as_far_as_they_go) {
  const auto attention = testing::create(CSpec(layer_of(2, 1, 8)).spec);
  qkv_plan_limits limits;
  qkv_plan_limits_init(&limits, sizeof limits);
  limits.max_requests = limits.max_query_len = 1;
  limits.max_tokens = 1;
  limits.max_seq_len = 8;
  int64_t whole = 0;
  expect_ok(qkv_attention_workspace_bytes(attention.get(), &limits, &whole));
  limits.struct_size = offsetof(qkv_plan_limits, max_keys);
  std::vector<char> older(limits.struct_size);
  std::memcpy(older.data(), &limits, older.size());
  int64_t bytes = -1;
  expect_ok(
      qkv_attention_workspace_bytes(attention.get(), reinterpret_cast<const qkv_plan_limits*>(older.data()), &bytes));
  EXPECT_EQ(bytes, whole);
}

TEST(c_api_errors, fields_of_a_newer_struct_must_be_zero) {
  struct Newer {
    qkv_layer_spec known;
    int64_t added[2];
  } newer;
  qkv_layer_spec_init(&newer.known, sizeof newer);
  EXPECT_EQ(newer.known.struct_size, sizeof newer);
  EXPECT_EQ(newer.added[1], 0);
  newer.known.num_q_heads = 2;
  newer.known.num_kv_heads = 1;
  newer.known.head_dim = 8;
  expect_ok(create(&newer.known));
  newer.added[1] = 1;
  expect_failed(create(&newer.known), QKV_UNSUPPORTED, "spec.struct_size");
}

TEST(c_api_errors, init_writes_no_byte_past_the_callers_struct) {
  char bytes[sizeof(qkv_layer_spec)];
  std::memset(bytes, 'x', sizeof bytes);
  qkv_layer_spec_init(reinterpret_cast<qkv_layer_spec*>(bytes), 40);
  EXPECT_EQ(bytes[39], 0);
  EXPECT_EQ(bytes[40], 'x');
  qkv_layer_spec_init(nullptr, 40);
}

TEST(c_api_errors, varlen_arguments_without_a_stream_run_on_the_default_stream) {
  qkv_varlen_arguments arguments;
  qkv_varlen_arguments_init(&arguments, sizeof arguments);
  int stream = 0;
  arguments.stream = &stream;
  EXPECT_EQ(api::from_c(&arguments).stream.handle, &stream);
  arguments.struct_size = offsetof(qkv_varlen_arguments, stream);
  EXPECT_EQ(api::from_c(&arguments).stream.handle, nullptr);
}

TEST(c_api_errors, structs_that_grow_end_without_padding) {
  // Padding there would be uninitialised in old programs and a field in new libraries.
  EXPECT_EQ(sizeof(qkv_layer_spec), offsetof(qkv_layer_spec, reserved) + sizeof(int32_t));
  EXPECT_EQ(sizeof(qkv_mla_spec), offsetof(qkv_mla_spec, reserved) + sizeof(int32_t));
  EXPECT_EQ(sizeof(qkv_batch), offsetof(qkv_batch, num_prefix_groups) + sizeof(int64_t));
  EXPECT_EQ(sizeof(qkv_varlen_arguments), offsetof(qkv_varlen_arguments, query_scale) + sizeof(qkv_tensor));
  EXPECT_EQ(sizeof(qkv_tensor), offsetof(qkv_tensor, stride) + 5 * sizeof(int64_t));
}

// --- text in small buffers ---

TEST(c_api_errors, text_is_cut_to_the_buffer_and_ends_with_0) {
  const std::string whole = parse_mask("causal").text();
  for (size_t capacity = 0; capacity <= whole.size() + 2; ++capacity) {
    std::vector<char> buffer(whole.size() + 4, 'x');
    size_t needed = 0;
    expect_ok(qkv_mask_text("causal", buffer.data(), capacity, &needed));
    EXPECT_EQ(needed, whole.size() + 1);
    if (capacity != 0) EXPECT_EQ(std::string(buffer.data()), whole.substr(0, capacity - 1));
    EXPECT_TRUE(
        std::all_of(buffer.begin() + static_cast<int64_t>(capacity), buffer.end(), [](char c) { return c == 'x'; }))
        << "written past " << capacity;
  }
}

TEST(c_api_errors, text_is_never_cut_within_a_character) {
  ASSERT_EQ(setenv("QKV_THREADS", "\u00e9\u20ac\U0001F600", 1), 0);  // 2, 3 and 4 bytes
  const std::string whole = info();
  const size_t at = whole.rfind("\u00e9");
  ASSERT_NE(at, std::string::npos);
  std::set<std::string> cut;
  for (size_t capacity = at + 1; capacity <= at + 10; ++capacity) {
    std::vector<char> buffer(capacity);
    expect_ok(qkv_info(buffer.data(), capacity, nullptr));
    cut.insert(buffer.data() + at);
  }
  unsetenv("QKV_THREADS");
  EXPECT_EQ(cut, (std::set<std::string>{"", "\u00e9", "\u00e9\u20ac", "\u00e9\u20ac\U0001F600"}));
}

}  // namespace
}  // namespace qkv
