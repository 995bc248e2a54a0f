// From config.json to layers: the public models' numbers, and configs that are refused.
#include "model_config.hpp"

#include <gmock/gmock.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::string path_of(const std::string& model) { return std::string(QKV_MODELS) + '/' + model + ".json"; }

Model model_of(const std::string& name, const ServingOptions& options = {}) {
  return read_model(path_of(name), options);
}

std::string mask_of(const LayerKind& kind) { return kind.spec.effective_mask().text(); }
std::string window_of(int64_t tokens) { return mask::sliding_window(tokens).text(); }

// A published config with some fields changed; null takes one away.
class Changed : public ::testing::Test {
 protected:
  std::string write(const std::string& model, const nlohmann::json& changes) {
    nlohmann::json config = nlohmann::json::parse(std::ifstream(path_of(model)));
    config.merge_patch(changes);
    return write_text(config.dump());
  }
  std::string write_text(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  Error error_of(const std::string& path, const ServingOptions& options = {}) {
    try {
      read_model(path, options);
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return {ErrorCode::internal, "", "", ""};
  }
  void TearDown() override { std::remove(path_.c_str()); }

  const std::string path_ =
      (std::filesystem::temp_directory_path() / ("qkv_config_" + std::to_string(getpid()) + ".json")).string();
};

TEST(ModelConfig, llama_has_one_kind_of_layer) {
  const Model model = model_of("llama");
  EXPECT_EQ(model.type, "llama");
  EXPECT_EQ(model.max_model_len, 131072);
  ASSERT_THAT(model.kinds, SizeIs(1));
  const LayerSpec& spec = model.kinds[0].spec;
  EXPECT_THAT(model.kinds[0].layers, SizeIs(32));
  EXPECT_EQ(spec.num_q_heads, 32);
  EXPECT_EQ(spec.num_kv_heads, 8);
  EXPECT_EQ(spec.head_dim, 128);  // hidden_size / heads
  EXPECT_EQ(spec.query_dtype, DType::bf16);
  EXPECT_EQ(spec.cache->page_size, 16);
  EXPECT_EQ(mask_of(model.kinds[0]), mask::causal().text());
}

TEST(ModelConfig, options_of_the_serving_run) {
  const Model model = model_of("llama", {.tensor_parallel = 4, .page_size = 64, .dtype = "f16"});
  const LayerSpec& spec = model.kinds[0].spec;
  EXPECT_EQ(spec.num_q_heads, 8);
  EXPECT_EQ(spec.num_kv_heads, 2);
  EXPECT_EQ(spec.cache->page_size, 64);
  EXPECT_EQ(spec.kv_dtype, DType::f16);
  EXPECT_EQ(model_of("llama", {.tensor_parallel = 16}).kinds[0].spec.num_kv_heads, 1) << "ranks keep copies";
}

TEST(ModelConfig, qwen_slides_from_max_window_layers_on_if_at_all) {
  EXPECT_THAT(model_of("qwen3").kinds, SizeIs(1));
  const Model model = model_of("qwen2");
  ASSERT_THAT(model.kinds, SizeIs(2));
  EXPECT_EQ(layer_numbers(model.kinds[0].layers), "layers 0-20");
  EXPECT_EQ(layer_numbers(model.kinds[1].layers), "layers 21-27");
  EXPECT_EQ(mask_of(model.kinds[1]), window_of(4096));
}

TEST(ModelConfig, mistral_slides_everywhere) {
  const Model model = model_of("mistral");
  ASSERT_THAT(model.kinds, SizeIs(1));
  EXPECT_EQ(mask_of(model.kinds[0]), window_of(4096));
}

TEST(ModelConfig, gemma2_alternates_with_softcap_and_its_own_scale) {
  const Model model = model_of("gemma2");
  ASSERT_THAT(model.kinds, SizeIs(2));
  EXPECT_EQ(model.kinds[0].layers[1], 2);
  EXPECT_EQ(mask_of(model.kinds[0]), window_of(4096));
  EXPECT_EQ(mask_of(model.kinds[1]), mask::causal().text());
  for (const LayerKind& kind : model.kinds) {
    EXPECT_EQ(kind.spec.softcap, 50);
    EXPECT_EQ(kind.spec.effective_scale(), 1.0F / 16);
    EXPECT_EQ(kind.spec.head_dim, 256);
  }
}

TEST(ModelConfig, gemma3_has_every_sixth_layer_full_and_fields_that_its_file_leaves_out) {
  const Model model = model_of("gemma3");
  ASSERT_THAT(model.kinds, SizeIs(2));
  EXPECT_EQ(layer_numbers(model.kinds[1].layers), "layers 5, 11, 17, 23, 29");
  EXPECT_EQ(mask_of(model.kinds[0]), window_of(1024));
  EXPECT_EQ(model.kinds[0].spec.num_q_heads, 8);
  EXPECT_EQ(model.kinds[0].spec.num_kv_heads, 4);
  EXPECT_EQ(model.kinds[0].spec.query_dtype, DType::bf16) << "of the outer config";
  EXPECT_THAT(model.notes, ElementsAre(HasSubstr("vision_config")));
}

TEST(ModelConfig, gpt_oss_has_sinks_and_named_layer_types) {
  const Model model = model_of("gpt_oss");
  ASSERT_THAT(model.kinds, SizeIs(2));
  EXPECT_EQ(mask_of(model.kinds[0]), window_of(128));
  EXPECT_THAT(model.kinds[0].layers, SizeIs(12));
  for (const LayerKind& kind : model.kinds) EXPECT_THAT(kind.spec.sinks, SizeIs(64));
}

TEST(ModelConfig, deepseek_expands_for_prompts_and_absorbs_for_decode) {
  const Model model = model_of("deepseek_v3", {.tensor_parallel = 8});
  ASSERT_THAT(model.kinds, SizeIs(3));
  const LayerSpec& expanded = model.kinds[0].spec;
  EXPECT_EQ(expanded.num_q_heads, 16);
  EXPECT_EQ(expanded.num_kv_heads, 16);
  EXPECT_EQ(expanded.head_dim, 192);
  EXPECT_EQ(expanded.head_dim_v, 128);
  EXPECT_FALSE(expanded.cache);
  EXPECT_EQ(mask_of(model.kinds[1]), mask::everything().text()) << "context comes before all new tokens";
  EXPECT_EQ(model.kinds[1].spec.out_dtype(), DType::f32) << "states that are merged, as MlaPrefill makes them";
  EXPECT_TRUE(model.has_latent_cache);
  const LayerSpec& absorbed = model.kinds[2].spec;
  EXPECT_EQ(absorbed.num_kv_heads, 1);
  EXPECT_EQ(absorbed.head_dim, 576);
  EXPECT_EQ(absorbed.head_dim_v, 512);
  EXPECT_FLOAT_EQ(absorbed.effective_scale(), 1 / std::sqrt(192.0F));
}

TEST(ModelConfig, caches_of_8_bit_floats_have_scales) {
  const LayerSpec spec = model_of("llama", {.kv_dtype = DType::f8e4m3}).kinds[0].spec;
  EXPECT_EQ(spec.query_dtype, DType::bf16);
  EXPECT_EQ(spec.kv_dtype, DType::f8e4m3);
  EXPECT_EQ(spec.kv_scales, KvScales::per_tensor);
  EXPECT_EQ(model_of("llama", {.kv_dtype = DType::f16}).kinds[0].spec.kv_scales, KvScales::none);
  const ServingOptions per_head = {.kv_dtype = DType::f8e5m2, .kv_scales = KvScales::per_head};
  EXPECT_EQ(model_of("gemma2", per_head).kinds[1].spec.kv_scales, KvScales::per_head);
  EXPECT_EQ(model_of("deepseek_v3", {.kv_dtype = DType::bf16}).kinds.size(), 3U) << "what it has anyway";
}

TEST(ModelConfig, runs_of_layers_are_told_as_ranges) {
  EXPECT_EQ(layer_numbers({3}), "layer 3");
  EXPECT_EQ(layer_numbers({0, 1, 2, 5, 7, 8}), "layers 0-2, 5, 7-8");
}

TEST_F(Changed, unknown_architecture_lists_those_that_are_known) {
  const Error error = error_of(write("llama", {{"model_type", "mamba"}}));
  EXPECT_EQ(error.value(), "model_type mamba");
  EXPECT_THAT(error.allowed(), HasSubstr("llama, mistral"));
  EXPECT_EQ(error_of(write("llama", {{"model_type", nullptr}})).value(), "no model_type");
}

TEST_F(Changed, missing_fields_are_named_all_at_once) {
  const Error error = error_of(write("llama", {{"num_attention_heads", nullptr}, {"hidden_size", nullptr}}));
  EXPECT_EQ(error.value(), "a llama config without hidden_size, num_attention_heads");
  EXPECT_THAT(error.allowed(), HasSubstr("max_position_embeddings"));
  EXPECT_THAT(error_of(write("deepseek_v3", {{"kv_lora_rank", nullptr}})).value(), HasSubstr("kv_lora_rank"));
}

TEST_F(Changed, values_that_mean_nothing_are_named_with_their_field) {
  EXPECT_THAT(error_of(write("llama", {{"num_hidden_layers", "32"}})).argument(), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(error_of(write("llama", {{"num_hidden_layers", 0}})).value(), "0");
  EXPECT_THAT(error_of(write("mistral", {{"sliding_window", -1}})).argument(), HasSubstr("sliding_window"));
  EXPECT_THAT(error_of(write("gemma2", {{"query_pre_attn_scalar", "x"}})).argument(),
              HasSubstr("query_pre_attn_scalar"));
  EXPECT_THAT(error_of(write("gpt_oss", {{"layer_types", {"full_attention"}}})).value(), "1 entries");
  EXPECT_THAT(error_of(write("gpt_oss", {{"layer_types", {"linear_attention"}}})).value(), "\"linear_attention\"");
  EXPECT_THAT(error_of(write("qwen2", {{"max_window_layers", "x"}})).code(), ErrorCode::invalid_argument);
  EXPECT_THAT(error_of(write("llama", {{"torch_dtype", "int8"}})).argument(), "dtype");
}

TEST_F(Changed, file_that_is_no_config) {
  EXPECT_EQ(error_of("/nowhere/config.json").code(), ErrorCode::unavailable);
  EXPECT_THAT(error_of(write_text("{\"model_type\": ")).value(), HasSubstr("no JSON"));
  EXPECT_THAT(error_of(write_text("[1]")).value(), "JSON that is no object");
  EXPECT_THAT(error_of(write_text("")).value(), HasSubstr("no JSON"));
}

TEST_F(Changed, latents_are_cached_in_the_models_dtype_or_in_8_bits) {
  const Error error = error_of(path_of("deepseek_v3"), {.kv_dtype = DType::f16});
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  EXPECT_EQ(error.argument(), "kv-dtype");
  const Model model = model_of("deepseek_v3", {.kv_dtype = DType::f8e4m3});
  for (const size_t expanded : {0, 1}) EXPECT_EQ(model.kinds[expanded].spec.kv_dtype, DType::bf16);
  EXPECT_EQ(model.kinds[2].spec.kv_dtype, DType::f8e4m3);
}

TEST_F(Changed, scales_belong_to_caches_of_8_bit_floats) {
  const Error error = error_of(path_of("llama"), {.kv_scales = KvScales::per_head});
  EXPECT_EQ(error.argument(), "kv-scales");
  EXPECT_EQ(error.value(), "per_head");
}

TEST_F(Changed, ranks_that_do_not_divide_the_heads) {
  EXPECT_EQ(error_of(path_of("llama"), {.tensor_parallel = 3}).argument(), "tp");
  EXPECT_EQ(error_of(path_of("qwen2"), {.tensor_parallel = 14}).allowed(), "a divisor of the model's 4 KV heads");
}

}  // namespace
}  // namespace qkv::tools
