// Scenes for tests that name their operands, and comparison with a predicate written by hand.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "mask/program.hpp"
#include "mask/scene.hpp"
#include "qkv/mask.hpp"
#include "qkv/status.hpp"

namespace qkv::test {

inline Tensor view_of(const std::vector<int32_t>& values) {
  return Tensor::contiguous(values.data(), DType::i32, {static_cast<int64_t>(values.size())});
}

inline MaskScene scene_of(int32_t q_len, int32_t kv_len, std::vector<MaskOperand> operands = {}) {
  MaskScene scene;
  scene.q_len = q_len;
  scene.kv_len = kv_len;
  scene.operands = std::move(operands);
  return scene;
}

// expected(q_pos, kv_pos), held against the definition, the vector code and the classes of 4 x 4 tiles.
template <typename Predicate>
void expect_visible(const Mask& mask, const MaskScene& scene, const Predicate& expected) {
  const mask::Program program = mask::compile(mask);
  const mask::ProgramInput input = mask::bind_scene(program.operands, scene);
  mask::RowScratch scratch;
  std::vector<int32_t> row(scene.kv_len);
  for (int32_t query = 0; query < scene.q_len; ++query) {
    const int32_t q_pos = query + scene.kv_len - scene.q_len;
    mask::evaluate_row(program, input, query, scene.q_head, 0, scene.kv_len, row.data(), scratch);
    for (int32_t key = 0; key < scene.kv_len; ++key) {
      const bool truth = expected(q_pos, key);
      ASSERT_EQ(is_visible(mask, scene, query, key), truth) << mask.text() << " at " << q_pos << ", " << key;
      ASSERT_EQ(row[key], truth ? -1 : 0) << mask.text() << " at " << q_pos << ", " << key;
      const int32_t q = query / 4 * 4;
      const int32_t kv = key / 4 * 4;
      const TileClass tile_class =
          classify_tile(mask, scene, q, std::min(q + 4, scene.q_len), kv, std::min(kv + 4, scene.kv_len));
      ASSERT_NE(tile_class, truth ? TileClass::empty : TileClass::full)
          << mask.text() << " at " << q_pos << ", " << key;
    }
  }
}

inline std::vector<int32_t> visible_keys(const Mask& mask, const MaskScene& scene, int32_t query) {
  std::vector<int32_t> keys;
  for (int32_t key = 0; key < scene.kv_len; ++key) {
    if (is_visible(mask, scene, query, key)) keys.push_back(key);
  }
  return keys;
}

inline std::vector<int32_t> range(int32_t begin, int32_t end) {
  std::vector<int32_t> numbers;
  for (int32_t i = begin; i < end; ++i) numbers.push_back(i);
  return numbers;
}

// The message of the Error that `call` throws; empty if it throws none.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The call throws an Error whose message holds `part`.
template <typename Call>
void expect_refused(const Call& call, const std::string& part) {
  const std::string message = error_of(call);
  EXPECT_NE(message.find(part), std::string::npos) << "message: " << message;
}

}  // namespace qkv::test
