// MLA prefill with 8-bit floats: latents that are cached in them, outputs that are rounded to them once, behind the
// last chunk.
#include <cmath>

#include "core/float8.hpp"
#include "mla_scene.hpp"

namespace qkv {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the scene's names

constexpr auto kMismatch = ErrorCode::mismatch;
constexpr DType kF8 = DType::f8e4m3;

// A layer, its latents in pages of the spec's cache, and a plan of several chunks.
struct Whole {
  explicit Whole(const MlaSpec& spec, Ints contexts = {40, 0, 61, 9, 100}, int32_t workspace_tokens = 48)
      : scene(spec, std::move(contexts), {3, 5, 1, 4, 2}),
        cache(scene, 1, 1),
        attention(spec),
        plan(make_plan(workspace_tokens)),
        latents(scene.new_latents()),
        workspace(DType::i32, {plan.workspace_bytes() / 4}) {}

  MlaPlan make_plan(int32_t workspace_tokens) const {
    ContextChunkOptions options = cache.options;
    options.workspace_tokens = workspace_tokens;
    Batch batch = scene.batch();
    batch.block_table = cache.block_table();
    return attention.plan(batch, options);
  }

  void forward(const Tensor& out, const Tensor& lse, const Tensor& out_scale, const Tensor& latent_scale) const {
    attention.forward(scene.query.view(), latents.view(), cache.caches[0].view(), plan,
                      matrix_projection(scene.spec, scene.matrix.view()), workspace.view(), out, lse, {}, {}, out_scale,
                      latent_scale);
  }

  int64_t num_tokens() const { return plan.num_tokens(); }

  Scene scene;
  SharedCache cache;
  MlaPrefill attention;
  MlaPlan plan;
  OwnedTensor latents, workspace;
};

MlaSpec with_cache(MlaSpec spec, DType dtype) {
  spec.cache_dtype = dtype;
  return spec;
}

MlaSpec with_output(MlaSpec spec, OutputScales scales) {
  spec.output_dtype = kF8;
  spec.output_scales = scales;
  return spec;
}

const std::vector<float> kScale = {kLatentScale};

TEST(mla_fp8, cached_latents_are_widened_and_scaled) {
  for (const DType dtype : {kF8, DType::f8e5m2, DType::i8}) {
    const Whole whole(with_cache(small_spec(), dtype));
    const OwnedTensor out(DType::f32, {whole.num_tokens(), kHeads, kValue}),
        lse(DType::f32, {kHeads, whole.num_tokens()});
    whole.forward(out.view(), lse.view(), {}, view(kScale, {1}));
    whole.scene.expect_right(out, lse);
  }
}

// Rows with a context, without one, and without any chunk in the batch.
TEST(mla_fp8, outputs_are_the_f32_results_rounded_once) {
  for (const Ints& contexts : {Ints{40, 0, 61, 9, 100}, Ints{0, 0, 0, 0, 0}}) {
    const Whole exact(small_spec(), contexts);
    const int64_t rows = exact.num_tokens() * kHeads;
    std::vector<float> results(rows * kValue);
    exact.forward(view(results, {exact.num_tokens(), kHeads, kValue}), {}, {}, {});
    for (const OutputScales scales : {OutputScales::per_tensor, OutputScales::per_token_group}) {
      const Whole whole(with_output(small_spec(), scales), contexts);
      const bool chosen = scales == OutputScales::per_token_group;
      std::vector<float> scale(chosen ? rows : 1, 0.01F);
      std::vector<uint8_t> codes(results.size(), 0x55);
      whole.forward(Tensor::contiguous(codes.data(), kF8, {whole.num_tokens(), kHeads, kValue}), {},
                    chosen ? view(scale, {whole.num_tokens(), kHeads, 1}) : view(scale, {1}), {});
      for (size_t i = 0; i < codes.size(); ++i) {
        const float divisor = chosen ? scale[i / kValue] : scale[0];
        ASSERT_EQ(codes[i], float8_from_f32(kF8, results[i] / divisor)) << i;
      }
      for (int64_t row = 0; chosen && row < rows; ++row) {
        float largest = 0;
        for (int64_t d = 0; d < kValue; ++d) largest = std::max(largest, std::fabs(results[row * kValue + d]));
        EXPECT_EQ(scale[row], largest / 448) << row;
      }
    }
  }
}

TEST(mla_fp8, tensors_that_do_not_fit_are_refused) {
  const Whole plain(small_spec());
  const Whole cached(with_cache(small_spec(), kF8));
  const Whole rounded(with_output(small_spec(), OutputScales::per_tensor));
  const OwnedTensor out(DType::f32, {plain.num_tokens(), kHeads, kValue});
  const OwnedTensor codes(kF8, {plain.num_tokens(), kHeads, kValue});
  const Tensor scale = view(kScale, {1});
  expect_refused([&] { plain.forward(out.view(), {}, {}, scale); }, kMismatch, "latent_scale");
  expect_refused([&] { plain.forward(out.view(), {}, scale, {}); }, kMismatch, "out_scale");
  expect_refused([&] { cached.forward(out.view(), {}, {}, {}); }, ErrorCode::invalid_argument, "latent_scale");
  expect_refused([&] { rounded.forward(codes.view(), {}, {}, {}); }, ErrorCode::invalid_argument, "out_scale");
  expect_refused([&] { rounded.forward(out.view(), {}, scale, {}); }, kMismatch, "out");
  const std::vector<float> zero = {0};
  expect_refused([&] { cached.forward(out.view(), {}, {}, view(zero, {1})); }, ErrorCode::invalid_argument,
                 "latent_scale[0]");
  // A plan lays out the workspace for its own layer.
  const auto with_plan = [&](const Whole& layer, const MlaPlan& plan) {
    layer.attention.forward(layer.scene.query.view(), layer.latents.view(), layer.cache.caches[0].view(), plan,
                            matrix_projection(layer.scene.spec, layer.scene.matrix.view()), layer.workspace.view(),
                            out.view(), {});
  };
  expect_refused([&] { with_plan(plain, cached.plan); }, kMismatch, "plan");
  expect_refused([&] { with_plan(plain, rounded.plan); }, kMismatch, "plan");
}

TEST(mla_fp8, a_callers_own_steps_join_to_an_8_bit_output) {
  const Whole whole(with_output(small_spec(), OutputScales::per_tensor));
  const Scene& scene = whole.scene;
  const int64_t num_tokens = whole.num_tokens();
  OwnedTensor context_out(DType::f32, {num_tokens, kHeads, kValue}), context_lse(DType::f32, {kHeads, num_tokens});
  OwnedTensor new_out(DType::f32, {num_tokens, kHeads, kValue}), new_lse(DType::f32, {kHeads, num_tokens});
  // Any states do: what counts is where the result goes.
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      tools::store(context_lse.view(), {h, t}, 0.25F);
      for (int64_t d = 0; d < kValue; ++d) tools::store(context_out.view(), {t, h, d}, 2);
    }
  }
  OwnedTensor keys, values;
  scene.expand(whole.latents.view(), keys, values);
  whole.attention.run_new_tokens(scene.query.view(), keys.view(), Scene::value(values), whole.plan, new_out.view(),
                                 new_lse.view());
  const OwnedTensor state = new_out, state_lse = new_lse;
  std::vector<uint8_t> codes(num_tokens * kHeads * kValue, 0x55);
  const Tensor out = Tensor::contiguous(codes.data(), kF8, {num_tokens, kHeads, kValue});
  const std::vector<float> scale = {0.02F};
  const State context{context_out.view(), context_lse.view()}, new_tokens{new_out.view(), new_lse.view()};
  expect_refused([&] { whole.attention.merge_context(context, new_tokens, whole.plan); }, ErrorCode::invalid_argument,
                 "out");
  whole.attention.merge_context(context, new_tokens, whole.plan, {}, out, view(scale, {1}));
  EXPECT_TRUE(state.buffer() == new_out.buffer());

  std::vector<float> joined(codes.size());
  merge_states({context, {state.view(), state_lse.view()}}, view(joined, {num_tokens, kHeads, kValue}));
  for (const TokenRange& tokens : whole.plan.empty_token_slices()) {
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      for (int64_t i = t * kHeads * kValue; i < (t + 1) * kHeads * kValue; ++i) {
        joined[i] = static_cast<const float*>(state.view().data)[i];
      }
    }
  }
  for (size_t i = 0; i < codes.size(); ++i) ASSERT_EQ(codes[i], float8_from_f32(kF8, joined[i] / scale[0])) << i;
}

}  // namespace
}  // namespace qkv
