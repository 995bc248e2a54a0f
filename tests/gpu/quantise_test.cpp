// quantise on a GPU has the CPU's bits, scales included.
#include "support/quantise_scene.hpp"

namespace qkv {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};

class gpu_quantise : public ::testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "needs a GPU";
  }
};

TEST_F(gpu_quantise, bytes_and_scales_are_those_of_the_cpu) {
  for (const testing::QuantiseCase& c : testing::quantise_cases()) {
    testing::QuantiseScene on_cpu(c), on_gpu(c);
    on_cpu.run();
    on_gpu.run(kGpu);
    EXPECT_EQ(on_cpu.out.buffer().bytes(), on_gpu.out.buffer().bytes());
    EXPECT_EQ(on_cpu.scale.buffer().bytes(), on_gpu.scale.buffer().bytes());
  }
}

// More tokens than CTAs' first turns would show a scale that is read before all have raised it.
TEST_F(gpu_quantise, scales_of_many_tokens_are_chosen_before_any_is_rounded) {
  constexpr int64_t kTokens = 20000, kHeads = 4, kDim = 128;
  tools::OwnedTensor rows(DType::bf16, {kTokens, kHeads, kDim});
  for (int64_t t = 0; t < kTokens; ++t) {
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t d = 0; d < kDim; ++d) {
        tools::store(rows.view(), {t, h, d},
                     static_cast<float>((t * 13 + d * 5 + h) % 997) * static_cast<float>(t + 1));
      }
    }
  }
  tools::OwnedTensor cpu(DType::f8e4m3, {kTokens, kHeads, kDim}), gpu(DType::f8e4m3, {kTokens, kHeads, kDim});
  tools::OwnedTensor cpu_scale(DType::f32, {2}), gpu_scale(DType::f32, {2});
  quantise(rows.view(), cpu.view(), cpu_scale.view(), ScaleSource::chosen);
  const tools::Placed placed(rows, kGpu), out(gpu, kGpu), scale(gpu_scale, kGpu);
  quantise(placed.view(), out.view(), scale.view(), ScaleSource::chosen);
  out.fetch();
  scale.fetch();
  EXPECT_EQ(cpu_scale.buffer().bytes(), gpu_scale.buffer().bytes());
  EXPECT_EQ(cpu.buffer().bytes(), gpu.buffer().bytes());
}

}  // namespace
}  // namespace qkv
