// A mask shifted to a run of keys against the mask itself, pair by pair.
#include "mask/shift.hpp"

#include <gtest/gtest.h>

#include "random_mask.hpp"

namespace qkv::test {
namespace {

// The scene of keys [begin, end) of `whole`, as an engine sees it that is shown nothing else: request 0 of a batch.
class RunScene {
 public:
  RunScene(const MaskScene& whole, int32_t begin, int32_t end)
      : scene(whole), position_shift_{whole.kv_len - (end - begin)}, key_shift_{begin}, request_number_{whole.request} {
    scene.request = 0;
    scene.kv_len = end - begin;
    scene.key_start = whole.key_start + begin;
    add(mask::kPositionShift, position_shift_);
    add(mask::kKeyShift, key_shift_);
    add(mask::kRequestNumber, request_number_);
  }
  RunScene(const RunScene&) = delete;

  // Arrays of requests begin at the scene's own.
  void cut_requests(const std::vector<OperandDeclaration>& declarations, int32_t request) {
    for (MaskOperand& operand : scene.operands) {
      for (const OperandDeclaration& declared : declarations) {
        if (declared.name == operand.name && declared.scope == OperandScope::request &&
            operand.values.shape[0] > request) {
          operand.values = operand.values.slice(0, request, request + 1);
        }
      }
    }
  }

  MaskScene scene;

 private:
  void add(const char* name, const std::vector<int32_t>& value) {
    scene.operands.push_back({name, Tensor::contiguous(value.data(), DType::i32, {1})});
  }
  std::vector<int32_t> position_shift_, key_shift_, request_number_;
};

TEST(shift, random_masks_keep_their_truth_in_every_run) {
  int32_t pairs = 0;
  for (int32_t seed = 0; seed < 6000; ++seed) {
    std::mt19937 generator(seed);
    RandomScene random(generator);
    const Mask mask = RandomMask(generator).truth(seed % 4);
    random.add_operands(operands_of(mask));
    const MaskScene& whole = random.scene;
    const int32_t context = whole.kv_len - whole.q_len;
    if (context < 0) continue;
    const int32_t begin = context == 0 ? 0 : static_cast<int32_t>(generator() % context);
    for (const auto& [run, first, last] :
         {std::tuple{KeyRun::context, begin, context}, {KeyRun::new_tokens, context, whole.kv_len}}) {
      const Mask shifted = mask::shift(mask, run);
      RunScene alone(whole, first, last);
      alone.cut_requests(operands_of(mask), whole.request);
      for (int32_t query = 0; query < whole.q_len; ++query) {
        for (int32_t key = first; key < last; ++key, ++pairs) {
          ASSERT_EQ(is_visible(shifted, alone.scene, query, key - first), is_visible(mask, whole, query, key))
              << "seed " << seed << ": " << mask.text() << " -> " << shifted.text();
        }
      }
    }
  }
  EXPECT_GT(pairs, 100'000);
}

TEST(shift, causal_needs_no_operands) {
  EXPECT_EQ(mask::shift(mask::causal(), KeyRun::context).text(), "true");
  EXPECT_EQ(mask::shift(mask::causal(), KeyRun::new_tokens).text(), mask::causal().text());
  EXPECT_TRUE(operands_of(mask::shift(mask::everything(), KeyRun::context)).empty());
}

TEST(shift, window_hides_the_context_behind_it_by_whole_tiles) {
  const Mask shifted = mask::shift(mask::causal() & mask::window(16, 0), KeyRun::context);
  MaskScene whole;
  whole.q_len = 8;
  whole.kv_len = 1008;
  const RunScene run(whole, 512, 1000);
  EXPECT_EQ(classify_tile(shifted, run.scene, 0, 8, 0, 128), TileClass::empty);
  EXPECT_EQ(classify_tile(shifted, run.scene, 0, 8, 470, 480), TileClass::partial);
  EXPECT_EQ(classify_tile(mask::shift(mask::causal() & mask::window(-1, 0), KeyRun::context), run.scene, 0, 8, 0, 488),
            TileClass::full);
}

}  // namespace
}  // namespace qkv::test
