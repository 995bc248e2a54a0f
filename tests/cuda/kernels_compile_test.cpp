// Every kernel of the test matrix compiles with NVRTC alone, without a GPU, and the main ones without spills (casebook
// 112).
#include <gtest/gtest.h>

#include "core/index/forward_sm80_shape.hpp"
#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "core/index/forward_sm90_many_rows_f8_shape.hpp"
#include "core/index/forward_sm90_many_rows_shape.hpp"
#include "cuda/device_rules.hpp"
#include "cuda/forward_sm90_few_rows.hpp"
#include "cuda/forward_sm90_many_rows.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/select.hpp"
#include "jit/module.hpp"
#include "jit/needs_nvrtc.hpp"
#include "support/small_layer.hpp"

namespace qkv::cuda {
namespace {

struct Architecture {
  const char* name;
  int shared_bytes;  // of a CTA
};

constexpr Architecture kArchitectures[] = {{"sm_90a", 232448}, {"sm_80", 166912}};

LayerSpec gpu_layer(int32_t group_size, int32_t head_dim, int32_t head_dim_v, std::optional<CacheSpec> cache) {
  LayerSpec layer = testing::layer_of(2 * group_size, 2, head_dim);
  layer.head_dim_v = head_dim_v;
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  layer.cache = cache;
  return layer;
}

std::vector<LayerSpec> matrix() {
  std::vector<LayerSpec> layers = {
      gpu_layer(4, 128, 128, CacheSpec{16}), gpu_layer(1, 64, 64, std::nullopt),
      gpu_layer(8, 192, 128, CacheSpec{64}), gpu_layer(1, 256, 256, CacheSpec{16}),
      gpu_layer(3, 72, 72, CacheSpec{1}),    gpu_layer(7, 512, 512, CacheSpec{19}),
      gpu_layer(71, 64, 64, CacheSpec{16}),  gpu_layer(4, 128, 128, CacheSpec{16}),
      gpu_layer(4, 128, 128, std::nullopt),  gpu_layer(2, 96, 40, CacheSpec{32}),
      gpu_layer(1, 96, 96, CacheSpec{16}),   gpu_layer(5, 96, 96, std::nullopt),
  };
  layers[1].mask = mask::everything();
  layers[2].mask = mask::prefix_lm(1023, true);
  layers[3].softcap = 50;
  layers[4].query_dtype = layers[4].kv_dtype = DType::f16;
  layers[4].alibi_per_request = true;
  layers[5].mask = mask::tree() & (mask::q_head() != 3);
  layers[7].mask = mask::per_request_causal() & mask::window(128, 128);
  layers[7].softcap = 30;
  layers[7].alibi_slopes.assign(8, 0.5F);
  layers[8].mask = mask::document() & mask::rswa(64);
  layers[8].output_dtype = DType::f32;
  layers[11].alibi_per_request = true;
  const auto add_8bit = [&](LayerSpec layer, DType kv_dtype, KvScales scales) {
    layer.kv_dtype = kv_dtype;
    layer.kv_scales = scales;
    layers.push_back(layer);
  };
  add_8bit(gpu_layer(4, 128, 128, CacheSpec{16}), DType::f8e4m3, KvScales::per_head);
  add_8bit(gpu_layer(4, 128, 128, CacheSpec{16}), DType::f8e4m3, KvScales::per_token_head);
  add_8bit(gpu_layer(1, 256, 256, CacheSpec{64}), DType::f8e5m2, KvScales::per_request_head);
  add_8bit(gpu_layer(7, 512, 512, CacheSpec{19}), DType::f8e4m3, KvScales::per_token_head);
  add_8bit(gpu_layer(2, 80, 48, CacheSpec{1}), DType::f8e4m3, KvScales::per_token_head);
  layers[layers.size() - 2].query_dtype = DType::f16;
  layers.back().query_dtype = DType::f16;
  layers.back().output_dtype = DType::f8e4m3;
  layers.back().softcap = 50;
  // Layers that are shown some of the keys, at even and at uneven distances.
  const auto add_shown = [&](LayerSpec layer, KeyRun run, const Shard& shard) {
    layer.key_run = run;
    layer.shard = shard;
    layers.push_back(layer);
  };
  add_shown(gpu_layer(4, 128, 128, CacheSpec{16}), KeyRun::context, {1, 4, 1});
  add_shown(gpu_layer(4, 128, 128, CacheSpec{16}), KeyRun::all, {7, 8, 16});
  layers.back().mask = mask::sliding_window(4096);
  layers.back().alibi_slopes.assign(8, 0.5F);
  add_shown(gpu_layer(1, 64, 64, std::nullopt), KeyRun::new_tokens, {});
  layers.back().alibi_per_request = true;
  add_shown(gpu_layer(2, 256, 256, CacheSpec{64}), KeyRun::context, {0, 3, 2});
  layers.back().mask = mask::prefix_lm(1023);
  layers.back().softcap = 30;
  add_8bit(gpu_layer(4, 128, 128, CacheSpec{16}), DType::f8e4m3, KvScales::per_token_head);
  layers.back().shard = {2, 4, 8};
  layers.back().alibi_slopes.assign(8, 0.5F);
  add_8bit(gpu_layer(8, 64, 64, CacheSpec{16}), DType::f8e5m2, KvScales::per_tensor);
  layers.back().mask = mask::document() & mask::window(100, 20);
  layers.back().alibi_per_request = true;
  add_8bit(gpu_layer(4, 192, 128, CacheSpec{16}), DType::f8e4m3, KvScales::per_token_head);
  // Widened on their way: of 64 columns, of f16 queries, and beside all terms.
  add_8bit(gpu_layer(1, 64, 64, CacheSpec{48}), DType::f8e4m3, KvScales::per_token_head);
  add_8bit(gpu_layer(4, 128, 128, CacheSpec{256}), DType::f8e5m2, KvScales::per_tensor);
  layers.back().query_dtype = DType::f16;
  layers.back().mask = mask::everything();
  add_8bit(gpu_layer(5, 128, 128, CacheSpec{64}), DType::f8e4m3, KvScales::per_token_head);
  layers.back().mask = mask::per_request_causal() & mask::window(128, 128);
  layers.back().softcap = 30;
  layers.back().alibi_slopes.assign(10, 0.5F);
  const auto add_float8_query = [&](LayerSpec layer, KvScales scales) {
    add_8bit(layer, DType::f8e4m3, scales);
    layers.back().query_dtype = DType::f8e4m3;
    layers.back().output_dtype = DType::bf16;
  };
  add_float8_query(gpu_layer(4, 128, 128, CacheSpec{16}), KvScales::per_head);
  add_float8_query(gpu_layer(1, 64, 64, CacheSpec{48}), KvScales::per_tensor);
  layers.back().mask = mask::everything();
  add_float8_query(gpu_layer(3, 256, 256, CacheSpec{64}), KvScales::per_request_head);
  layers.back().output_dtype = DType::f32;
  add_float8_query(gpu_layer(1, 256, 256, CacheSpec{64}), KvScales::per_tensor);
  layers.back().mask = mask::everything();
  add_float8_query(gpu_layer(5, 128, 128, CacheSpec{64}), KvScales::per_request_head);
  layers.back().mask = mask::per_request_causal() & mask::window(128, 128);
  layers.back().softcap = 30;
  layers.back().alibi_slopes.assign(10, 0.5F);
  add_float8_query(gpu_layer(4, 128, 128, CacheSpec{16}), KvScales::per_token_head);
  add_float8_query(gpu_layer(2, 80, 48, CacheSpec{1}), KvScales::per_head);
  // Dense.
  for (const int32_t head_dim : {64, 128}) {
    add_8bit(gpu_layer(4, head_dim, head_dim, std::nullopt), DType::f8e4m3, KvScales::per_token_head);
    add_float8_query(gpu_layer(4, head_dim, head_dim, std::nullopt), KvScales::per_request_head);
  }
  add_float8_query(gpu_layer(2, 256, 256, std::nullopt), KvScales::per_head);
  add_8bit(gpu_layer(2, 80, 48, std::nullopt), DType::i8, KvScales::per_token_head);
  // Outputs of 8 bits, of a given scale and of chosen ones.
  const auto add_float8_output = [&](LayerSpec layer, DType dtype, OutputScales scales) {
    layer.output_dtype = dtype;
    layer.output_scales = scales;
    layers.push_back(layer);
  };
  for (const OutputScales scales : {OutputScales::per_tensor, OutputScales::per_token_group}) {
    add_float8_output(gpu_layer(4, 128, 128, CacheSpec{16}), DType::f8e4m3, scales);
    add_float8_output(gpu_layer(1, 64, 64, std::nullopt), DType::f8e5m2, scales);
    add_float8_output(gpu_layer(1, 192, 128, std::nullopt), DType::f8e4m3, scales);
    add_float8_output(gpu_layer(2, 256, 256, CacheSpec{64}), DType::f8e4m3, scales);
  }
  add_float8_output(gpu_layer(7, 512, 512, CacheSpec{19}), DType::f8e4m3, OutputScales::per_token_group);
  add_float8_output(gpu_layer(4, 80, 144, CacheSpec{16}), DType::f8e4m3, OutputScales::per_token_group);
  for (const int32_t head_dim : {64, 128, 256}) {
    add_float8_query(gpu_layer(2, head_dim, head_dim, CacheSpec{16}), KvScales::per_head);
    layers.back().output_dtype = DType::f8e4m3;
    layers.back().output_scales = OutputScales::per_token_group;
  }
  add_8bit(gpu_layer(4, 128, 128, CacheSpec{16}), DType::i8, KvScales::per_head);
  add_8bit(gpu_layer(4, 128, 128, CacheSpec{64}), DType::i8, KvScales::per_token_head);
  layers.back().query_dtype = DType::f16;
  add_8bit(gpu_layer(8, 64, 64, CacheSpec{16}), DType::i8, KvScales::per_token_head);
  layers.back().softcap = 50;
  layers.back().alibi_per_request = true;
  add_8bit(gpu_layer(1, 256, 256, CacheSpec{1}), DType::i8, KvScales::per_request_head);
  add_8bit(gpu_layer(7, 512, 512, CacheSpec{19}), DType::i8, KvScales::per_token_head);
  add_8bit(gpu_layer(4, 192, 128, CacheSpec{16}), DType::i8, KvScales::per_tensor);
  layers.back().shard = {2, 4, 8};
  return layers;
}

// ALiBi over keys at uneven distances: each score's distance is computed from its key's number, and the row's position
// and slope wait in memory meanwhile.
int spills_of_distances(const LayerSpec& layer) {
  const bool alibi = layer.alibi_per_request || !layer.alibi_slopes.empty();
  return alibi && layer.shard.num_ranks > 1 && layer.shard.interleave_size > 1 ? 160 : 0;
}

class kernels_compile : public NeedsNvrtc, public ::testing::WithParamInterface<size_t> {};
class small_kernels_compile : public NeedsNvrtc {};

TEST_P(kernels_compile, forward_sm80) {
  const LayerSpec layer = matrix()[GetParam()];
  ASSERT_TRUE(explain(layer, {DeviceKind::cuda, 0}).empty());
  for (const Architecture& architecture : kArchitectures) {
    const index::ForwardSm80Shape shape =
        index::forward_sm80_shape(layer.head_dim, layer.value_dim(), architecture.shared_bytes);
    for (const auto& [tile_q, shared_rows] : {std::pair(shape.tile_q, 0), std::pair(16, 0), std::pair(16, 1)}) {
      if (shared_rows == 1 && (2 * layer.group_size() > 16 || !layer.cache)) continue;
      const jit::Source source = forward_source(
          layer, {"forward_sm80", architecture.name, tile_q, shape.tile_kv, {{"shared_rows", shared_rows}}});
      const jit::Compiled compiled = jit::compile(source);
      EXPECT_FALSE(compiled.cubin.empty());
      EXPECT_EQ(compiled.entry, "forward_sm80");
      // Above 256, the accumulators alone fill the registers: some 100 bytes of a row's bookkeeping go to memory.
      // Scales of tokens keep two addresses more: a few words that are read and written once a tile.
      const bool token_scales = layer.cache && layer.kv_scales == KvScales::per_token_head;
      if (layer.head_dim <= 256) {
        // CTAs that take turns at items keep two words more than there is room for, beside the largest tile, an f32
        // output and a mask of several operands.
        const bool all_at_once = layer.out_dtype() == DType::f32 && layer.head_dim == 128;
        // Where nothing is hidden, ptxas interleaves more of a tile of 8-bit rows than registers hold.
        const bool unmasked_bytes = size_bytes(layer.kv_dtype) == 1 && layer.mask && layer.mask->text() == "true";
        EXPECT_LE(compiled.usage.spill_store_bytes, (unmasked_bytes ? 52
                                                     : token_scales ? 48
                                                     : all_at_once  ? 8
                                                                    : 0) +
                                                        spills_of_distances(layer))
            << source.name;
      }
      EXPECT_TRUE(compiled.usage.serialized_wgmma.empty()) << source.name;
    }
  }
}

TEST_P(kernels_compile, forward_sm90_many_rows) {
  const LayerSpec layer = matrix()[GetParam()];
  const DeviceFacts facts{kArchitectures[0].name, 132, kArchitectures[0].shared_bytes};
  if (!ForwardSm90ManyRows::supports(layer, facts)) return;  // the sm_80 kernel runs these
  const ForwardKey key = ForwardSm90ManyRows::key(layer, facts);
  const jit::Compiled compiled = jit::compile(forward_source(layer, key));
  const bool is_float8 = layer.query_dtype == DType::f8e4m3;
  EXPECT_EQ(compiled.entry, is_float8 ? "forward_sm90_many_rows_f8" : "forward_sm90_many_rows");
  // Softcap and ALiBi together keep more in hand than there are registers: two words of a row's bookkeeping.
  const bool all_terms = layer.softcap > 0 && !layer.alibi_slopes.empty();
  EXPECT_LE(compiled.usage.spill_store_bytes, (all_terms ? 8 : 0) + spills_of_distances(layer)) << compiled.log;
  EXPECT_TRUE(compiled.usage.serialized_wgmma.empty()) << compiled.log;
}

TEST_P(kernels_compile, forward_sm90_few_rows) {
  namespace shape = index::few_rows;
  const LayerSpec layer = matrix()[GetParam()];
  const int head_dim_v = layer.value_dim();
  if (!ForwardSm90FewRows::supports(layer, facts_of_arch("sm_90a"))) return;  // the sm_80 kernel runs these
  const shape::KeyValueShape kv = few_rows_shape(layer);
  for (int tile_q = shape::tile_rows(layer.group_size()); tile_q <= shape::max_rows(head_dim_v); tile_q *= 2) {
    // One of both kinds of launch for each tile: both are compiled for the smallest.
    for (const auto& [few_items, takes_turns] :
         {std::pair(true, false), std::pair(false, false), std::pair(false, true)}) {
      if (few_items && tile_q != shape::tile_rows(layer.group_size())) continue;
      const shape::LaunchShape launch = shape::launch_shape(kv, tile_q, few_items, takes_turns);
      const jit::Compiled compiled =
          jit::compile(forward_source(layer, {"forward_sm90_few_rows",
                                              "sm_90a",
                                              tile_q,
                                              shape::tile_keys(kv, tile_q),
                                              {{"num_warps", launch.num_warps},
                                               {"num_stages", launch.num_stages},
                                               {"min_ctas", launch.min_ctas},
                                               {"cluster_size", few_items ? 1 : shape::kMaxClusterSplits},
                                               {"takes_turns", takes_turns ? 1 : 0},
                                               {"request_tile_q", tile_q}}}));
      EXPECT_EQ(compiled.entry, "forward_sm90_few_rows");
      // What is kept from turn to turn: some words, where the rows alone fill the registers.
      EXPECT_LE(compiled.usage.spill_store_bytes, (takes_turns ? 128 : 0) + spills_of_distances(layer)) << compiled.log;
      EXPECT_LE(compiled.usage.stack_bytes, (takes_turns ? 128 : 0) + spills_of_distances(layer))
          << "an array of registers is in memory";
    }
  }
}

TEST_P(kernels_compile, forward_sm90_few_rows_of_several_requests) {
  const LayerSpec layer = matrix()[GetParam()];
  const DeviceFacts facts = facts_of_arch("sm_90a");
  const ForwardKernels kernels = forward_kernels(layer, facts);
  if (!layer.cache || !kernels.few_rows_sm90 || max_shared_rows(layer, kernels) == 0) return;
  const int32_t most_rows = index::few_rows::max_rows(layer.value_dim()) / 2;
  for (int32_t tile_q = index::few_rows::tile_rows(layer.group_size()); tile_q <= most_rows; tile_q *= 2) {
    for (const bool takes_turns : {false, true}) {
      const jit::Compiled compiled = jit::compile(
          forward_source(layer, ForwardSm90FewRows::key(layer, facts, {tile_q, false, false, takes_turns, true})));
      EXPECT_EQ(compiled.entry, "forward_sm90_few_rows");
      EXPECT_LE(compiled.usage.spill_store_bytes, 24) << compiled.log;
    }
  }
}

TEST_P(kernels_compile, planner) {
  const LayerSpec layer = matrix()[GetParam()];
  for (const Architecture& architecture : kArchitectures) {
    const jit::Compiled compiled = jit::compile(forward_source(layer, {"plan_batch", architecture.name, 0, 0}));
    EXPECT_EQ(compiled.entry, "plan_batch");
    EXPECT_EQ(compiled.usage.spill_store_bytes, 0) << compiled.log;
  }
}

// Ranks share their kernels: the rank is an argument.
TEST(kernel_key, does_not_tell_ranks_apart) {
  LayerSpec layer = gpu_layer(4, 128, 128, CacheSpec{16});
  const auto text_of = [&](const Shard& shard) {
    layer.shard = shard;
    return forward_source(layer, {"forward_sm80", "sm_80", 64, 64}).text;
  };
  EXPECT_EQ(text_of({0, 4, 2}), text_of({3, 4, 2}));
  EXPECT_NE(text_of({0, 4, 2}), text_of({0, 2, 2}));
  EXPECT_NE(text_of({0, 4, 2}), text_of({0, 4, 1}));
}

INSTANTIATE_TEST_SUITE_P(matrix, kernels_compile, ::testing::Range<size_t>(0, matrix().size()));

TEST_F(small_kernels_compile, without_constants) {
  for (const Architecture& architecture : kArchitectures) {
    for (const char* kernel : {"merge_plan_states", "merge_states", "cache_write", "cache_quantise", "gather",
                               "gather_widened", "quantise", "check_indices"}) {
      const jit::Compiled compiled = jit::compile(plain_source(kernel, architecture.name));
      EXPECT_FALSE(compiled.cubin.empty());
      // Turns at items cost five words, stored once an item and read once a row: none in the loops over states.
      const bool takes_turns = kernel == std::string_view("merge_plan_states");
      EXPECT_LE(compiled.usage.spill_store_bytes, takes_turns ? 20 : 0) << kernel;
    }
  }
}

}  // namespace
}  // namespace qkv::cuda
