// The mask of a layer that has some of the heads.
#include <gtest/gtest.h>

#include "mask/shift.hpp"
#include "qkv/mask.hpp"

namespace qkv {
namespace {

TEST(with_first_head, counts_heads_from_there) {
  const Mask even = mask::causal() & ((mask::q_head() == 5) | (mask::q_head() < mask::kv_pos()));
  MaskScene scene;
  scene.q_len = 3;
  scene.kv_len = 9;
  for (const int32_t first : {0, 1, 5}) {
    const Mask of_some = mask::with_first_head(even, first);
    for (int32_t head = 0; head < 4; ++head) {
      for (int32_t query = 0; query < 3; ++query) {
        for (int32_t key = 0; key < 9; ++key) {
          scene.q_head = head;
          const bool seen = is_visible(of_some, scene, query, key);
          scene.q_head = first + head;
          EXPECT_EQ(seen, is_visible(even, scene, query, key)) << first << " " << head << " " << query << " " << key;
        }
      }
    }
  }
}

TEST(with_first_head, leaves_masks_alike_on_all_heads_alone) {
  EXPECT_EQ(mask::with_first_head(mask::causal(), 7).hash(), mask::causal().hash());
  EXPECT_EQ(mask::with_first_head(mask::prefix_lm(9), 7).text(), mask::prefix_lm(9).text());
}

}  // namespace
}  // namespace qkv
