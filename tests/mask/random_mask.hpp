// Random scenes and random expressions over all atoms, operators and operand scopes, for tests that hold the fast paths
// against the definition. A seed names a case.
#pragma once

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "qkv/mask.hpp"

namespace qkv::test {

// Operand values of every scope; `scene` views them, so the object stays where it is.
class RandomScene {
 public:
  explicit RandomScene(std::mt19937& generator) : generator_(generator) {
    scene.request = draw(0, 3);
    scene.q_head = draw(0, 7);
    scene.q_len = draw(0, 12);
    scene.kv_len = draw(0, 40);
    scene.query_start = draw(0, 5);
    scene.key_start = draw(0, 5);
    add("of_request", scene.request + 1);
    add("flag", scene.request + 1);
    add("of_query", scene.query_start + scene.q_len);
    add("query_id", scene.query_start + scene.q_len);
    add("of_key", scene.key_start + scene.kv_len);
    add("key_id", scene.key_start + scene.kv_len);
  }
  RandomScene(const RandomScene&) = delete;

  // Values for what a mask declares besides the above.
  void add_operands(const std::vector<OperandDeclaration>& declarations) {
    for (const auto& [name, scope] : declarations) {
      const auto has_name = [&name = name](const MaskOperand& operand) { return operand.name == name; };
      if (std::any_of(scene.operands.begin(), scene.operands.end(), has_name)) continue;
      add(name, scope == OperandScope::request ? scene.request + 1
                : scope == OperandScope::key   ? scene.key_start + scene.kv_len
                                               : scene.query_start + scene.q_len);
    }
  }

  MaskScene scene;

 private:
  int32_t draw(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(generator_); }

  // Mostly near the positions, sometimes few distinct values, sometimes the extremes of 32 bits.
  void add(const std::string& name, int64_t length) {
    std::vector<int32_t>& values = storage_.emplace_back(length);
    const int32_t kind = draw(0, 9);
    int32_t run = 0;
    for (int32_t& value : values) {
      if (draw(0, 4) == 0) ++run;
      value = kind < 5          ? draw(-3, 42)
              : kind < 8        ? run
              : draw(0, 1) == 0 ? INT32_MIN + draw(0, 2)
                                : INT32_MAX - draw(0, 2);
    }
    scene.operands.push_back({name, Tensor::contiguous(values.data(), DType::i32, {length})});
  }

  std::mt19937& generator_;
  std::deque<std::vector<int32_t>> storage_;
};

class RandomMask {
 public:
  explicit RandomMask(std::mt19937& generator) : generator_(generator) {}

  Mask truth(int32_t depth) {
    if (depth == 0) return draw(0, 19) == 0 ? (draw(0, 1) ? mask::everything() : mask::nothing()) : comparison(1);
    switch (draw(0, 9)) {
      case 0:
        return ~truth(depth - 1);
      case 1:
      case 2:
      case 3:
        return truth(depth - 1) & truth(depth - 1);
      case 4:
      case 5:
      case 6:
        return truth(depth - 1) | truth(depth - 1);
      case 7:
        return built_in();
      default:
        return comparison(depth);
    }
  }

 private:
  int32_t draw(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(generator_); }

  Mask comparison(int32_t depth) {
    const MaskValue a = value(depth);
    const MaskValue b = value(depth);
    switch (draw(0, 5)) {
      case 0:
        return a < b;
      case 1:
        return a <= b;
      case 2:
        return a > b;
      case 3:
        return a >= b;
      case 4:
        return a == b;
      default:
        return a != b;
    }
  }

  MaskValue value(int32_t depth) {
    if (depth > 0 && draw(0, 2) == 0) {
      const MaskValue a = value(depth - 1);
      const MaskValue b = value(depth - 1);
      return draw(0, 1) ? a + b : a - b;
    }
    switch (draw(0, 13)) {
      case 0:
      case 1:
        return mask::q_pos();
      case 2:
      case 3:
        return mask::kv_pos();
      case 4:
        return mask::q_head();
      case 5:
        return mask::request();
      case 6:
        return mask::q_len();
      case 7:
        return mask::kv_len();
      case 8:
        return mask::operand(draw(0, 1) ? "of_request" : "flag", OperandScope::request);
      case 9:
        return mask::operand(draw(0, 1) ? "of_query" : "query_id", OperandScope::query);
      case 10:
        return mask::operand(draw(0, 1) ? "of_query" : "query_id", OperandScope::new_key);
      case 11:
        return mask::operand(draw(0, 1) ? "of_key" : "key_id", OperandScope::key);
      case 12:
        return draw(0, 9) == 0 ? MaskValue((int64_t{1} << draw(20, 57)) * (draw(0, 1) ? 1 : -1))
                               : MaskValue(draw(-4, 4));
      default:
        return draw(-4, 45);
    }
  }

  Mask built_in() {
    switch (draw(0, 3)) {
      case 0:
        return mask::causal();
      case 1:
        return mask::window(draw(-1, 9), draw(-1, 9));
      case 2:
        return mask::operand("of_query", OperandScope::query) == mask::operand("of_key", OperandScope::key);
      default:
        return mask::sliding_window(draw(1, 9), draw(0, 1) == 1);
    }
  }

  std::mt19937& generator_;
};

}  // namespace qkv::test
