// MLA prefill through the C interface: the C++ calls' own bits, and what is refused.
#include <cmath>
#include <thread>

#include "c_api/c_structs.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::CBatch;
using testing::expect_ok;
using testing::to_c;
using tools::OwnedTensor;

constexpr int64_t kHeads = 2, kNope = 16, kRope = 8, kValue = 24, kRank = 32, kPage = 8;

OwnedTensor filled(int64_t index, std::initializer_list<int64_t> shape) {
  tools::Draw draw(23, index);
  return testing::normal_values(draw, 0.3F, shape);
}

struct c_mla : ::testing::Test {
  c_mla() {
    qkv_mla_spec_init(&spec, sizeof spec);
    spec.num_heads = kHeads;
    spec.qk_nope_head_dim = kNope;
    spec.qk_rope_head_dim = kRope;
    spec.v_head_dim = kValue;
    spec.kv_lora_rank = kRank;
    spec.dtype = QKV_F32;
    spec.page_size = kPage;
    spec.mask = "causal & window(20, 0)";
    spec.sinks = sinks;
    spec.num_sinks = kHeads;
    qkv_context_chunk_options_init(&options, sizeof options);
    options.workspace_tokens = 16;
    options.page_size = kPage;
    batch.query_start_loc = testing::view(starts);
    batch.seq_lens = testing::view(lengths);
    batch.block_table = Tensor::contiguous(table.data(), DType::i32, {1, 4});
  }

  // What C++ makes of the same.
  std::vector<float> run_cpp() {
    MlaSpec layer;
    layer.num_heads = kHeads;
    layer.qk_nope_head_dim = kNope;
    layer.qk_rope_head_dim = kRope;
    layer.v_head_dim = kValue;
    layer.kv_lora_rank = kRank;
    layer.dtype = DType::f32;
    layer.cache.page_size = kPage;
    layer.mask = mask::causal() & mask::window(20, 0);
    layer.sinks = {sinks[0], sinks[1]};
    ContextChunkOptions chunk_options;
    chunk_options.workspace_tokens = 16;
    chunk_options.page_size = kPage;
    const MlaPrefill prefill(layer);
    const MlaPlan plan = prefill.plan(batch, chunk_options);
    std::vector<float> workspace(plan.workspace_bytes() / 4);
    OwnedTensor result(DType::f32, {5, kHeads, kValue});
    prefill.forward(query.view(), new_latents.view(), cache.view(), plan, matrix_projection(layer, matrix.view()),
                    Tensor::contiguous(workspace.data(), DType::f32, {static_cast<int64_t>(workspace.size())}),
                    result.view());
    const auto* values = static_cast<const float*>(result.view().data);
    return {values, values + result.view().num_elements()};
  }

  float sinks[2] = {0.4F, -0.1F};
  std::vector<int32_t> starts = {0, 5};
  std::vector<int32_t> lengths = {31};
  std::vector<int32_t> table = {3, 0, 2, 1};
  Batch batch;
  OwnedTensor matrix = filled(1, {kHeads * (kNope + kValue), kRank});
  OwnedTensor cache = filled(2, {4, kPage, kRank + kRope});
  OwnedTensor new_latents = filled(3, {5, kRank + kRope});
  OwnedTensor query = filled(4, {5, kHeads, kNope + kRope});
  OwnedTensor out{DType::f32, {5, kHeads, kValue}};
  qkv_mla_spec spec;
  qkv_context_chunk_options options;
};

int32_t project_by_matrix(void* context, const qkv_tensor* latents, const qkv_tensor* key_nope, const qkv_tensor* value,
                          qkv_stream) {
  const auto* weights = static_cast<const float*>(context);
  const auto row = [&](const qkv_tensor& out, int64_t t, int64_t head, int64_t first) {
    const auto* latent = static_cast<const float*>(latents->data) + t * latents->stride[0];
    auto* result = static_cast<float*>(out.data) + t * out.stride[0] + head * out.stride[1];
    for (int64_t d = 0; d < out.shape[2]; ++d) {
      result[d] = 0;
      for (int64_t c = 0; c < kRank; ++c) {
        result[d] += latent[c] * weights[(head * (kNope + kValue) + first + d) * kRank + c];
      }
    }
  };
  for (int64_t t = 0; t < latents->shape[0]; ++t) {
    for (int64_t head = 0; head < kHeads; ++head) {
      row(*key_nope, t, head, 0);
      row(*value, t, head, kNope);
    }
  }
  return 0;
}

TEST_F(c_mla, forward_does_what_its_cpp_namesake_does) {
  qkv_mla_prefill* prefill = nullptr;
  qkv_mla_plan* plan = nullptr;
  expect_ok(qkv_mla_prefill_create(&spec, {QKV_CPU, 0}, &prefill));
  const CBatch c_batch(batch);
  expect_ok(qkv_mla_prefill_plan(prefill, &c_batch.batch, &options, &plan, nullptr));

  int32_t num_chunks = 0;
  expect_ok(qkv_mla_plan_num_chunks(plan, &num_chunks));
  ASSERT_EQ(num_chunks, 2);
  qkv_context_chunk chunk;
  expect_ok(qkv_mla_plan_chunk(plan, 1, &chunk));
  EXPECT_EQ(chunk.starts[0], 16);
  EXPECT_EQ(chunk.seq_lens[0], 10);
  EXPECT_EQ(chunk.is_continuation, 1);
  EXPECT_EQ(chunk.continuation_token_end, 5);
  EXPECT_EQ(chunk.local_seq_lens, nullptr);

  int64_t bytes = 0;
  int64_t bytes_at_most = 0;
  expect_ok(qkv_mla_plan_workspace_bytes(plan, &bytes));
  expect_ok(qkv_mla_prefill_workspace_bytes(prefill, 5, 16, 0, &bytes_at_most));
  EXPECT_LE(bytes, bytes_at_most);
  std::vector<float> workspace(bytes / 4);
  const qkv_tensor query_view = to_c(query.view()), latents = to_c(new_latents.view()), pages = to_c(cache.view()),
                   weights = to_c(matrix.view()), result = to_c(out.view()),
                   memory = to_c(Tensor::contiguous(workspace.data(), DType::f32, {bytes / 4}));

  const std::vector<float> expected = run_cpp();
  const auto* values = static_cast<const float*>(out.view().data);
  qkv_projection* by_matrix = nullptr;
  qkv_projection* by_caller = nullptr;
  expect_ok(qkv_matrix_projection_create(&spec, &weights, &by_matrix));
  expect_ok(qkv_projection_create(project_by_matrix, matrix.view().data, &by_caller));
  const auto forward = [&](const qkv_projection* projection, const qkv_stream* gather_stream) {
    return qkv_mla_forward(prefill, &query_view, &latents, &pages, plan, projection, &memory, nullptr, &result, nullptr,
                           nullptr, nullptr, gather_stream, nullptr);
  };
  expect_ok(forward(by_matrix, nullptr));
  EXPECT_EQ(std::vector<float>(values, values + expected.size()), expected);
  expect_ok(forward(by_caller, nullptr));
  const qkv_stream beside = nullptr;  // a CPU has none; all the same, the parameter is taken
  expect_ok(forward(by_caller, &beside));
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-5);
  qkv_projection_destroy(by_matrix);
  qkv_projection_destroy(by_caller);
  qkv_mla_plan_destroy(plan);
  qkv_mla_prefill_destroy(prefill);
}

TEST_F(c_mla, refusals_are_statuses) {
  qkv_mla_prefill* prefill = nullptr;
  spec.v_head_dim = 0;
  EXPECT_EQ(qkv_mla_prefill_create(&spec, {QKV_CPU, 0}, &prefill), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "v_head_dim");
  EXPECT_EQ(prefill, nullptr);
  size_t needed = 0;
  expect_ok(qkv_mla_explain(&spec, {QKV_CPU, 0}, nullptr, 0, &needed));
  EXPECT_GT(needed, 1U);
  spec.v_head_dim = kValue;
  expect_ok(qkv_mla_prefill_create(&spec, {QKV_CPU, 0}, &prefill));
  qkv_mla_plan* plan = nullptr;
  const CBatch c_batch(batch);
  options.workspace_tokens = 4;
  EXPECT_EQ(qkv_mla_prefill_plan(prefill, &c_batch.batch, &options, &plan, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_STREQ(qkv_last_error_argument(), "workspace_tokens");
  options.struct_size = 0;
  EXPECT_EQ(qkv_mla_prefill_plan(prefill, &c_batch.batch, &options, &plan, nullptr), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_mla_prefill_plan(prefill, nullptr, &options, &plan, nullptr), QKV_INVALID_ARGUMENT);
  qkv_projection* projection = nullptr;
  EXPECT_EQ(qkv_projection_create(nullptr, nullptr, &projection), QKV_INVALID_ARGUMENT);
  EXPECT_EQ(qkv_mla_forward(prefill, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                            nullptr, nullptr, nullptr, nullptr),
            QKV_INVALID_ARGUMENT);
  qkv_mla_prefill_destroy(prefill);
}

// Tokens go round two ranks page by page: pages 0 and 2 of the request are rank 0's, 1 and 3 rank 1's.
TEST_F(c_mla, threads_that_share_a_cache_have_the_result_of_one) {
  const std::vector<float> expected = run_cpp();
  const std::vector<int32_t> tables[2] = {{table[0], table[2]}, {table[1], table[3]}};
  options.num_ranks = 2;
  options.interleave_size = kPage;
  qkv_collectives* ranks[2] = {};
  expect_ok(qkv_in_process_ranks(2, {QKV_CPU, 0}, 0, ranks));
  const auto body = [&](int32_t rank) {
    Batch own = batch;
    own.block_table = Tensor::contiguous(tables[rank].data(), DType::i32, {1, 2});
    qkv_context_chunk_options own_options = options;
    own_options.rank = rank;
    const CBatch c_batch(own);
    qkv_mla_prefill* prefill = nullptr;
    qkv_mla_plan* plan = nullptr;
    qkv_projection* projection = nullptr;
    const qkv_tensor weights = to_c(matrix.view());
    expect_ok(qkv_mla_prefill_create(&spec, {QKV_CPU, 0}, &prefill));
    expect_ok(qkv_matrix_projection_create(&spec, &weights, &projection));
    expect_ok(qkv_mla_prefill_plan(prefill, &c_batch.batch, &own_options, &plan, nullptr));
    int64_t bytes = 0, bytes_at_most = 0;
    expect_ok(qkv_mla_plan_workspace_bytes(plan, &bytes));
    expect_ok(qkv_mla_prefill_workspace_bytes(prefill, 5, 16, 2, &bytes_at_most));
    EXPECT_LE(bytes, bytes_at_most);
    std::vector<float> workspace(bytes / 4);
    OwnedTensor own_out{DType::f32, {5, kHeads, kValue}};
    const qkv_tensor query_view = to_c(query.view()), latents = to_c(new_latents.view()), pages = to_c(cache.view()),
                     result = to_c(own_out.view()),
                     memory = to_c(Tensor::contiguous(workspace.data(), DType::f32, {bytes / 4}));
    EXPECT_EQ(qkv_mla_forward(prefill, &query_view, &latents, &pages, plan, projection, &memory, nullptr, &result,
                              nullptr, nullptr, nullptr, nullptr, nullptr),
              QKV_MISMATCH)
        << "a plan for two ranks";
    expect_ok(qkv_mla_forward(prefill, &query_view, &latents, &pages, plan, projection, &memory, ranks[rank], &result,
                              nullptr, nullptr, nullptr, nullptr, nullptr));
    const auto* values = static_cast<const float*>(own_out.view().data);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values[i], expected[i], 1e-5);
    qkv_mla_plan_destroy(plan);
    qkv_projection_destroy(projection);
    qkv_mla_prefill_destroy(prefill);
    qkv_collectives_destroy(ranks[rank]);
  };
  std::thread other(body, 1);
  body(0);
  other.join();
}

}  // namespace
}  // namespace qkv
