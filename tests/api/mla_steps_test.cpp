// The steps of MLA prefill in the caller's hands, ranks that share a cache, and what is refused.
#include <cmath>

#include "core/index/interleave.hpp"
#include "qkv/reference.hpp"
#include "support/rank_threads.hpp"
#include "support/small_layer.hpp"

namespace qkv {
namespace {

using testing::expect_refused;
using tools::OwnedTensor;
using Ints = std::vector<int32_t>;

constexpr int32_t kHeads = 2, kNope = 16, kRope = 8, kHeadDim = kNope + kRope, kValue = 24, kRank = 32, kPage = 8;

MlaSpec small_spec() {
  MlaSpec spec;
  spec.num_heads = kHeads;
  spec.qk_nope_head_dim = kNope;
  spec.qk_rope_head_dim = kRope;
  spec.v_head_dim = kValue;
  spec.kv_lora_rank = kRank;
  spec.dtype = DType::f32;
  spec.cache.page_size = kPage;
  return spec;
}

// Latents of all tokens of all requests, the matrix, and what plain attention makes of them.
struct Scene {
  Scene(MlaSpec of_layer, Ints context_lens, Ints q_lens)
      : spec(std::move(of_layer)), contexts(std::move(context_lens)) {
    tools::Draw draw(17, static_cast<int64_t>(contexts.size()));
    for (size_t r = 0; r < contexts.size(); ++r) {
      query_start_loc.push_back(query_start_loc.back() + q_lens[r]);
      seq_lens.push_back(contexts[r] + q_lens[r]);
      num_keys += seq_lens.back();
    }
    const auto filled = [&](std::initializer_list<int64_t> shape, float magnitude) {
      OwnedTensor tensor(DType::f32, shape);
      auto* values = static_cast<float*>(tensor.view().data);
      for (int64_t i = 0; i < tensor.view().num_elements(); ++i) values[i] = magnitude * draw.normal();
      return tensor;
    };
    latents = filled({num_keys, kRank + kRope}, 1);
    matrix = filled({kHeads * (kNope + kValue), kRank}, 0.2F);
    query = filled({query_start_loc.back(), kHeads, kHeadDim}, 1);
    expand(latents.view(), key, value_memory);
    LayerSpec layer = testing::layer_of(kHeads, kHeads, kHeadDim);
    layer.head_dim_v = kValue;
    layer.mask = spec.mask;
    layer.sinks = spec.sinks;
    expected = reference::attention(layer, batch(), query.view(), key.view(), value(value_memory));
  }

  // Keys, and values as a strided view of rows of a wider projection's result.
  void expand(const Tensor& rows, OwnedTensor& keys, OwnedTensor& wide) const {
    keys = OwnedTensor(DType::f32, {rows.shape[0], kHeads, kHeadDim});
    wide = OwnedTensor(DType::f32, {rows.shape[0], kHeads, kNope + kValue});
    matrix_projection(spec, matrix.view())({rows.slice(1, 0, kRank), keys.view().slice(2, 0, kNope), value(wide), {}});
    for (int64_t t = 0; t < rows.shape[0]; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t d = 0; d < kRope; ++d) {
          tools::store(keys.view(), {t, h, kNope + d}, tools::load(rows, {t, kRank + d}));
        }
      }
    }
  }
  static Tensor value(const OwnedTensor& wide) { return wide.view().slice(2, kNope, kNope + kValue); }

  Batch batch() const {
    Batch batch;
    batch.query_start_loc = testing::view(query_start_loc);
    batch.seq_lens = testing::view(seq_lens);
    return batch;
  }

  // Rows of the new tokens, one request after another.
  OwnedTensor new_latents() const {
    OwnedTensor rows(DType::f32, {query_start_loc.back(), kRank + kRope});
    for (size_t r = 0; r < contexts.size(); ++r) {
      for (int64_t t = contexts[r]; t < seq_lens[r]; ++t) {
        copy_row(first_key(r) + t, rows.view(), query_start_loc[r] + t - contexts[r]);
      }
    }
    return rows;
  }

  int64_t first_key(size_t request) const {
    int64_t first = 0;
    for (size_t r = 0; r < request; ++r) first += seq_lens[r];
    return first;
  }
  void copy_row(int64_t key, const Tensor& rows, int64_t row) const {
    for (int64_t d = 0; d < kRank + kRope; ++d) tools::store(rows, {row, d}, tools::load(latents.view(), {key, d}));
  }

  void expect_right(const OwnedTensor& out, const OwnedTensor& lse) const {
    const int64_t num_tokens = query_start_loc.back();
    for (int64_t t = 0; t < num_tokens; ++t) {
      for (int64_t h = 0; h < kHeads; ++h) {
        EXPECT_NEAR(tools::load(lse.view(), {h, t}), expected.lse[h * num_tokens + t], 1e-4);
        for (int64_t d = 0; d < kValue; ++d) {
          ASSERT_NEAR(tools::load(out.view(), {t, h, d}), expected.out[(t * kHeads + h) * kValue + d], 1e-4)
              << t << ", " << h;
        }
      }
    }
  }

  MlaSpec spec;
  Ints contexts;
  Ints query_start_loc = {0};
  Ints seq_lens;
  int64_t num_keys = 0;
  OwnedTensor latents, matrix, query, key, value_memory;
  reference::Result expected;
};

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

// Every rank keeps the tokens that are its own, in pages of its own, under one block table.
struct SharedCache {
  static constexpr int64_t kPagesOfRequest = 16;

  SharedCache(const Scene& scene, int32_t num_ranks, int32_t interleave_size) {
    options.page_size = kPage;
    options.num_ranks = num_ranks;
    options.interleave_size = interleave_size;
    options.workspace_tokens = static_cast<int32_t>(scene.contexts.size()) * chunk_alignment(options);
    const auto num_pages = static_cast<int64_t>(scene.contexts.size()) * kPagesOfRequest;
    for (int32_t p = 0; p < num_pages; ++p) table.push_back(p);
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      caches.emplace_back(DType::f32, std::initializer_list<int64_t>{num_pages, kPage, kRank + kRope});
      for (size_t r = 0; r < scene.contexts.size(); ++r) {
        for (int32_t t = 0; t < scene.contexts[r]; ++t) {
          if (index::rank_of_token(t, num_ranks, interleave_size) != rank) continue;
          const int32_t local = index::local_position(t, num_ranks, interleave_size);
          const int64_t page = static_cast<int64_t>(r) * kPagesOfRequest + local / kPage;
          const Tensor rows =
              Tensor::contiguous(static_cast<float*>(caches.back().view().data) + page * kPage * (kRank + kRope),
                                 DType::f32, {kPage, kRank + kRope});
          scene.copy_row(scene.first_key(r) + t, rows, local % kPage);
        }
      }
    }
  }

  Tensor block_table() const {
    const auto num_requests = static_cast<int64_t>(table.size()) / kPagesOfRequest;
    return Tensor::contiguous(table.data(), DType::i32, {num_requests, kPagesOfRequest});
  }

  ContextChunkOptions options;
  Ints table;
  std::vector<OwnedTensor> caches;  // [num_ranks]
};

// All gather as many rows as rank 0 has; the rows side by side are what an all-gather gives.
TEST(mla_steps, ranks_that_share_a_cache) {
  for (const auto& [num_ranks, interleave_size] : {std::pair{4, 1}, {2, 8}, {3, 2}}) {
    const Scene scene(small_spec(), {65, 96, 0, 13}, {3, 2, 4, 1});
    const SharedCache shared(scene, num_ranks, interleave_size);
    const MlaPrefill attention(scene.spec);
    const MlaPlan plan = attention.plan(scene.batch(), shared.options);
    run_steps(scene, attention, plan, [&](const ContextChunk& chunk) {
      const int64_t padded = chunk.num_padded_local_rows();
      OwnedTensor gathered(DType::f32, {shared.options.num_ranks * padded, kRank + kRope});
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
}

// The ranks as threads: each reads pages of its own only, and has the whole result.
TEST(mla_steps, threads_that_share_a_cache_run_the_whole) {
  MlaSpec spec = small_spec();
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
                        matrix_projection(spec, scene.matrix.view()), workspace.view(), *own, out.view(), lse.view());
      scene.expect_right(out, lse);
    });
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
  expect_refused([&] { MlaPrefill attention(spec); }, ErrorCode::unsupported, "spec");
  spec = small_spec();
  spec.mask = mask::operand("qkv_key_shift", OperandScope::request) < mask::q_pos();
  EXPECT_EQ(explain(spec).size(), 1U);
  spec = small_spec();
  spec.output_dtype = DType::f8e4m3;
  spec.cache.scales = CacheScales::per_tensor;
  ASSERT_EQ(explain(spec).size(), 2U);
  EXPECT_NE(explain(spec)[0].find("output_dtype: got f8e4m3"), std::string::npos);
  EXPECT_NE(explain(spec)[1].find("cache.scales: got per_tensor"), std::string::npos);
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
