// The steps of MLA prefill in the caller's hands, ranks that share a cache, and what is refused.
#include <gmock/gmock.h>

#include <cmath>

#include "mla_scene.hpp"
#include "support/rank_threads.hpp"

namespace qkv {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the scene's names

// What an engine does that gathers, exchanges and projects by itself: a state a chunk, joined to those before it.
// rows_of(chunk): the chunk's latents in the order of its tokens.
void run_steps(const Scene& scene, const MlaPrefill& attention, const MlaPlan& plan,
               const std::function<OwnedTensor(const ContextChunk&)>& rows_of) {
  const int64_t num_tokens = plan.num_tokens();
  OwnedTensor context_out(DType::f32, {num_tokens, kHeads, kValue}), context_lse(DType::f32, {kHeads, num_tokens});
  OwnedTensor keys, values;
  for (const ContextChunk& chunk : plan.chunks()) {
    const OwnedTensor rows = rows_of(chunk);
    scene.expand(rows.view(), keys, values);
    const auto [begin, end] = chunk.tokens;
    OwnedTensor out(DType::f32, {end - begin, kHeads, kValue}), lse(DType::f32, {kHeads, end - begin});
    attention.run_context_chunk(chunk.index, scene.query.view().slice(0, begin, end), keys.view(), Scene::value(values),
                                plan, out.view(), lse.view());
    const auto join = [&](int32_t first, int32_t last, bool continues) {
      const State state{out.view().slice(0, first - begin, last - begin),
                        lse.view().slice(1, first - begin, last - begin)};
      const State context{context_out.view().slice(0, first, last), context_lse.view().slice(1, first, last)};
      merge_states(continues ? std::vector<State>{context, state} : std::vector<State>{state}, context.out,
                   context.lse);
    };
    const int32_t continued = chunk.is_continuation ? chunk.continuation_token_end : begin;
    if (continued > begin) join(begin, continued, true);
    if (end > continued) join(continued, end, false);
  }
  OwnedTensor out(DType::f32, {num_tokens, kHeads, kValue}), lse(DType::f32, {kHeads, num_tokens});
  const OwnedTensor new_rows = scene.new_latents();
  scene.expand(new_rows.view(), keys, values);
  attention.run_new_tokens(scene.query.view(), keys.view(), Scene::value(values), plan, out.view(), lse.view());
  attention.merge_context({context_out.view(), context_lse.view()}, {out.view(), lse.view()}, plan);
  scene.expect_right(out, lse);
}

TEST(mla_steps, of_the_caller_equal_attention_over_all_keys) {
  MlaSpec spec = small_spec();
  for (const bool with_terms : {false, true}) {
    if (with_terms) {
      spec.mask = mask::causal() & mask::window(30, 0);
      spec.sinks = {0.3F, -0.7F};
    }
    const Scene scene(spec, {40, 0, 61, 9, 100}, {3, 5, 1, 4, 2});
    const MlaPrefill attention(spec);
    ContextChunkOptions options;
    options.page_size = kPage;
    options.workspace_tokens = 48;
    const MlaPlan plan = attention.plan(scene.batch(), options);
    EXPECT_EQ(plan.empty_token_slices(), (std::vector<TokenRange>{{3, 8}}));
    run_steps(scene, attention.clone(), plan, [&](const ContextChunk& chunk) {
      OwnedTensor rows(DType::f32, {chunk.num_context_tokens, kRank + kRope});
      for (int64_t row = 0; row < chunk.num_context_tokens; ++row) {
        const int32_t i = chunk.token_to_seq[row];
        scene.copy_row(scene.first_key(chunk.request_begin + i) + chunk.starts[i] + row - chunk.cu_seq_lens[i],
                       rows.view(), row);
      }
      return rows;
    });
  }
}

// A run of 5 tokens at a time: nearly all of them begin inside a page, and some cross into the next.
TEST(mla_steps, chunks_may_be_gathered_from_starts_inside_a_page) {
  const Scene scene(small_spec(), {40, 0, 61, 9, 100}, {3, 5, 1, 4, 2});
  const SharedCache cache(scene, 1, 1);
  const MlaPrefill attention(scene.spec);
  const MlaPlan plan = attention.plan(scene.batch(), cache.options);
  run_steps(scene, attention, plan, [&](const ContextChunk& chunk) {
    OwnedTensor rows(DType::f32, {chunk.num_context_tokens, kRank + kRope});
    for (int32_t i = 0; i < chunk.num_requests(); ++i) {
      const int32_t request = chunk.request_begin + i;
      for (int32_t first = 0; first < chunk.seq_lens[i]; first += 5) {
        const int32_t count = std::min(5, chunk.seq_lens[i] - first);
        const Ints start = {chunk.starts[i] + first}, cu_seq_lens = {0, count};
        const int64_t row = chunk.cu_seq_lens[i] + first;
        gather_cache(cache.caches[0].view(), cache.block_table().slice(0, request, request + 1), view(start),
                     view(cu_seq_lens), rows.view().slice(0, row, row + count));
      }
    }
    return rows;
  });
}

// All gather as many rows as rank 0 has; the rows side by side are what an all-gather gives. Chunks begin at the
// request's pages, yet inside a rank's, which hold as many of its tokens as num_ranks pages of the request.
TEST(mla_steps, ranks_that_share_a_cache) {
  bool begins_inside_a_page = false;
  for (const auto& [num_ranks, interleave_size] : {std::pair{4, 1}, {2, 8}, {3, 2}}) {
    const Scene scene(small_spec(), {65, 96, 0, 13}, {3, 2, 4, 1});
    const SharedCache shared(scene, num_ranks, interleave_size);
    const MlaPrefill attention(scene.spec);
    const MlaPlan plan = attention.plan(scene.batch(), shared.options);
    run_steps(scene, attention, plan, [&](const ContextChunk& chunk) {
      const int64_t padded = chunk.num_padded_local_rows();
      OwnedTensor gathered(DType::f32, {shared.options.num_ranks * padded, kRank + kRope});
      for (const int32_t start : chunk.local_starts) begins_inside_a_page |= start % kPage != 0;
      for (int64_t rank = 0; rank < shared.options.num_ranks; ++rank) {
        gather_cache(shared.caches[rank].view(), shared.block_table().slice(0, chunk.request_begin, chunk.request_end),
                     testing::view(chunk.local_starts), testing::view(chunk.padded_local_cu_seq_lens),
                     gathered.view().slice(0, rank * padded, (rank + 1) * padded));
      }
      OwnedTensor rows(DType::f32, {chunk.num_context_tokens, kRank + kRope});
      for (int64_t row = 0; row < chunk.num_context_tokens; ++row) {
        for (int64_t d = 0; d < kRank + kRope; ++d) {
          tools::store(rows.view(), {row, d}, tools::load(gathered.view(), {chunk.all_gathered_rows[row], d}));
        }
      }
      return rows;
    });
  }
  EXPECT_TRUE(begins_inside_a_page);
}

// The ranks as threads: each reads pages of its own only, and has the whole result.
TEST(mla_steps, threads_that_share_a_cache_run_the_whole) {
  for (const std::optional<DType> cache_dtype : {std::optional<DType>(), {DType::f8e4m3}}) {
    MlaSpec spec = small_spec();
    spec.cache_dtype = cache_dtype;
    const std::vector<float> scale = {kLatentScale};
    spec.mask = mask::causal() & mask::window(50, 0);
    spec.sinks = {0.3F, -0.7F};
    const Scene scene(spec, {65, 96, 0, 13, 1}, {3, 2, 4, 1, 2});
    for (const auto& [num_ranks, interleave_size] : {std::pair{1, 1}, {4, 1}, {2, 8}, {3, 2}, {8, 4}}) {
      const SharedCache shared(scene, num_ranks, interleave_size);
      const MlaPrefill attention(spec);
      test::on_each_rank(in_process_ranks(num_ranks), [&](const std::shared_ptr<Collectives>& own) {
        const int32_t rank = own->rank();
        ContextChunkOptions options = shared.options;
        options.rank = rank;
        Batch batch = scene.batch();
        batch.block_table = shared.block_table();
        const MlaPlan plan = attention.plan(batch, options);
        const int64_t num_tokens = plan.num_tokens();
        EXPECT_LE(plan.workspace_bytes(),
                  attention.workspace_bytes(num_tokens, options.workspace_tokens, options.num_ranks));
        const OwnedTensor workspace(DType::i32, {plan.workspace_bytes() / 4});
        const OwnedTensor out(DType::f32, {num_tokens, kHeads, kValue}), lse(DType::f32, {kHeads, num_tokens});
        attention.forward(scene.query.view(), scene.new_latents().view(), shared.caches[rank].view(), plan,
                          matrix_projection(spec, scene.matrix.view()), workspace.view(), *own, out.view(), lse.view(),
                          {}, {}, {}, cache_dtype ? view(scale, {1}) : Tensor());
        scene.expect_right(out, lse);
      });
    }
  }
}

TEST(mla_steps, layers_that_cannot_run_say_why) {
  MlaSpec spec = small_spec();
  EXPECT_TRUE(explain(spec).empty());
  spec.qk_rope_head_dim = -1;
  spec.kv_lora_rank = 0;
  EXPECT_EQ(explain(spec).size(), 2U);
  EXPECT_NE(explain(spec)[0].find("qk_rope_head_dim: got -1"), std::string::npos);
  spec = small_spec();
  spec.sinks = {1.0F};
  spec.dtype = DType::i32;
  EXPECT_FALSE(explain(spec).empty());
  expect_refused([&] { MlaPrefill attention(spec); }, ErrorCode::invalid_argument, "dtype");
  spec.dtype = DType::f32;
  EXPECT_THAT(explain(spec, {DeviceKind::cuda, 0}),
              ::testing::ElementsAre("dtype: got f32; allowed: f16 or bf16 on a GPU"));
  spec = small_spec();
  spec.v_head_dim = 513;
  EXPECT_THAT(explain(spec), ::testing::ElementsAre("v_head_dim: got 513; allowed: 8 to 512"));
  spec = small_spec();
  spec.mask = mask::operand("qkv_key_shift", OperandScope::request) < mask::q_pos();
  EXPECT_EQ(explain(spec).size(), 1U);
  const auto why = [](const std::function<void(MlaSpec&)>& change) {
    MlaSpec changed = small_spec();
    change(changed);
    const std::vector<std::string> reasons = explain(changed);
    return reasons.empty() ? std::string() : reasons[0];
  };
  EXPECT_THAT(why([](MlaSpec& s) { s.dtype = DType::f8e4m3; }), ::testing::StartsWith("dtype: got f8e4m3"));
  EXPECT_THAT(why([](MlaSpec& s) { s.cache_dtype = DType::bf16; }), ::testing::StartsWith("cache_dtype: got bf16"));
  EXPECT_THAT(why([](MlaSpec& s) { s.output_scales = OutputScales::per_token_group; }),
              ::testing::StartsWith("output_scales: got per_token_group"));
}

struct Refusals : ::testing::Test {
  Refusals() : scene(small_spec(), {20}, {3}), attention(scene.spec), cache(DType::f32, {4, kPage, kRank + kRope}) {
    options.page_size = kPage;
    options.workspace_tokens = 16;
    latents = scene.new_latents();
    batch = scene.batch();
    batch.block_table = Tensor::contiguous(table.data(), DType::i32, {1, 3});
  }

  void forward(const MlaPlan& plan) {
    attention.forward(scene.query.view(), latents.view(), cache.view(), plan,
                      matrix_projection(scene.spec, scene.matrix.view()), workspace.view(), out.view());
  }
  // `change` makes the call one that is refused; nothing is written by it.
  void expect_forward_refused(const MlaPlan& plan, ErrorCode code, const std::string& argument) {
    expect_refused([&] { forward(plan); }, code, argument);
    EXPECT_TRUE(std::isnan(tools::load(out.view(), {0, 0, 0})));
    EXPECT_TRUE(std::isnan(tools::load(workspace.view(), {0})));
  }

  Scene scene;
  MlaPrefill attention;
  ContextChunkOptions options;
  Batch batch;
  Ints table = {2, 0, 1};
  OwnedTensor cache, latents;
  OwnedTensor workspace{DType::f32, {20000}};
  OwnedTensor out{DType::f32, {3, kHeads, kValue}};
};

TEST_F(Refusals, workspace_too_small_says_how_much_is_needed) {
  const MlaPlan plan = attention.plan(batch, options);
  EXPECT_LE(plan.workspace_bytes(), attention.workspace_bytes(3, 16));
  workspace = OwnedTensor(DType::f32, {plan.workspace_bytes() / 4 - 1});
  try {
    forward(plan);
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "workspace");
    EXPECT_NE(error.allowed().find(std::to_string(plan.workspace_bytes())), std::string::npos);
  }
  workspace = OwnedTensor(DType::f32, {20000});
  const Tensor memory = workspace.view();
  for (const Tensor& wrong : {memory.slice(0, 1, 20000), Tensor::strided(memory.data, DType::f32, {10000}, {2})}) {
    expect_refused(
        [&] {
          attention.forward(scene.query.view(), latents.view(), cache.view(), plan,
                            matrix_projection(scene.spec, scene.matrix.view()), wrong, out.view());
        },
        ErrorCode::invalid_argument, "workspace");
  }
  options.workspace_tokens = 4;
  expect_refused([&] { attention.plan(batch, options); }, ErrorCode::invalid_argument, "workspace_tokens");
}

TEST_F(Refusals, batches_that_make_no_plan) {
  options.page_size = 16;
  expect_refused([&] { attention.plan(batch, options); }, ErrorCode::mismatch, "options.page_size");
  options.page_size = kPage;
  const Ints short_lens = {2};
  Batch wrong = batch;
  wrong.seq_lens = testing::view(short_lens);
  expect_refused([&] { attention.plan(wrong, options); }, ErrorCode::mismatch, "seq_lens[0]");
  wrong = batch;
  wrong.block_table = batch.block_table.slice(1, 0, 2);
  expect_refused([&] { attention.plan(wrong, options); }, ErrorCode::invalid_argument, "block_table");
  const std::vector<int64_t> slots = {1, 2, 3};
  wrong = batch;
  wrong.slot_mapping = testing::view(slots);
  expect_refused([&] { attention.plan(wrong, options); }, ErrorCode::mismatch, "slot_mapping");
}

TEST_F(Refusals, tensors_and_plans_that_do_not_belong_together) {
  const MlaPlan plan = attention.plan(batch, options);
  cache = OwnedTensor(DType::f32, {2, kPage, kRank + kRope});
  expect_forward_refused(plan, ErrorCode::mismatch, "block_table");
  cache = OwnedTensor(DType::f32, {4, kPage, kRank});
  expect_forward_refused(plan, ErrorCode::mismatch, "latent_cache");
  cache = OwnedTensor(DType::f32, {4, kPage, kRank + kRope});
  latents = OwnedTensor(DType::f32, {2, kRank + kRope});
  expect_forward_refused(plan, ErrorCode::mismatch, "new_latents");
  latents = scene.new_latents();

  MlaSpec other = small_spec();
  other.kv_lora_rank = 16;
  expect_forward_refused(MlaPrefill(other).plan(batch, options), ErrorCode::mismatch, "plan");
  other = small_spec();
  other.mask = mask::causal() & mask::window(8, 0);
  expect_forward_refused(MlaPrefill(other).plan(batch, options), ErrorCode::mismatch, "plan");
  Batch without_table = scene.batch();
  expect_forward_refused(attention.plan(without_table, options), ErrorCode::invalid_argument, "block_table");
  options.num_ranks = 2;
  expect_forward_refused(attention.plan(batch, options), ErrorCode::mismatch, "plan");
  const auto ranks = in_process_ranks(2);
  options.rank = 1;
  const MlaPlan of_rank_1 = attention.plan(batch, options);
  expect_refused(
      [&] {
        attention.forward(scene.query.view(), latents.view(), cache.view(), of_rank_1,
                          matrix_projection(scene.spec, scene.matrix.view()), workspace.view(), *ranks[0], out.view());
      },
      ErrorCode::mismatch, "collectives");
  options.rank = 2;
  expect_refused([&] { attention.plan(batch, options); }, ErrorCode::invalid_argument, "rank");

  expect_refused(
      [&] {
        attention.forward(scene.query.view(), latents.view(), cache.view(), plan, {}, workspace.view(), out.view());
      },
      ErrorCode::invalid_argument, "projection");
  expect_refused([&] { attention.run_context_chunk(2, scene.query.view(), {}, {}, plan, {}, {}); },
                 ErrorCode::invalid_argument, "chunk");
  OwnedTensor narrow(DType::f32, {kHeads * (kNope + kValue), kRank - 1});
  expect_refused([&] { matrix_projection(scene.spec, narrow.view()); }, ErrorCode::mismatch, "kv_b_proj");
}

}  // namespace
}  // namespace qkv
