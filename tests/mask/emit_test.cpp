// The text that kernels evaluate, held against the definition: compiled for the host by the compiler of this test.
#include "mask/emit.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

#include "mask/scene.hpp"
#include "random_mask.hpp"

namespace qkv::test {
namespace {

constexpr size_t kMaxOperands = 8;

// As the generated file declares it.
struct MaskContext {
  int request, q_len, kv_len;
  const int* operand[kMaxOperands];
};
using Visible = bool(const MaskContext&, int q_pos, int kv_pos, int q_head, int query);
// TileClass as a number, so that no type is shared with the generated file.
using Classify = int(const MaskContext&, int q_low, int q_high, int kv_low, int kv_high);

// Many masks as one file, and that as a shared object.
class CompiledMasks {
 public:
  explicit CompiledMasks(const std::vector<Mask>& masks) {
    std::string pattern = ::testing::TempDir() + "qkv_emit_XXXXXX";
    const char* made = mkdtemp(pattern.data());
    if (made == nullptr) throw std::runtime_error("no folder " + pattern);
    folder_ = made;
    std::ofstream(folder_ / "masks.cpp") << file_of(masks);
    const std::string command = fmt::format("'{}' -std=c++20 -O0 -w -shared -fPIC '{}/masks.cpp' -o '{}/masks.so'",
                                            QKV_CXX_COMPILER, folder_.string(), folder_.string());
    if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
    library_.reset(dlopen((folder_ / "masks.so").c_str(), RTLD_NOW | RTLD_LOCAL));
    if (library_ == nullptr) throw std::runtime_error(dlerror());
    functions_ = static_cast<Visible* const*>(dlsym(library_.get(), "masks"));
    if (functions_ == nullptr) throw std::runtime_error(dlerror());
    classes_ = static_cast<Classify* const*>(dlsym(library_.get(), "classes"));
    if (classes_ == nullptr) throw std::runtime_error(dlerror());
  }
  ~CompiledMasks() { std::filesystem::remove_all(folder_); }
  CompiledMasks(const CompiledMasks&) = delete;
  CompiledMasks& operator=(const CompiledMasks&) = delete;

  Visible& operator[](size_t mask) const { return *functions_[mask]; }
  Classify& classify(size_t mask) const { return *classes_[mask]; }

 private:
  static std::string file_of(const std::vector<Mask>& masks) {
    std::string text =
        "#define __device__\n"
        "#define __forceinline__ inline\n"
        "struct MaskContext { int request, q_len, kv_len; const int* operand[8]; };\n"
        "enum class TileClass { empty, partial, full };\n";
    std::string table, classes;
    for (size_t i = 0; i < masks.size(); ++i) {
      const mask::Program program = mask::compile(masks[i]);
      text +=
          fmt::format("namespace mask_{} {{\n{}{}", i, mask::emit_cuda(program), mask::emit_tile_class_cuda(program));
      text +=
          "int as_number(const MaskContext& m, int q_low, int q_high, int kv_low, int kv_high) {\n"
          "  return int(classify(m, q_low, q_high, kv_low, kv_high));\n}\n}\n";
      table += fmt::format("mask_{}::visible,\n", i);
      classes += fmt::format("mask_{}::as_number,\n", i);
    }
    return text + "using Visible = bool(const MaskContext&, int, int, int, int);\n" +
           "using Classify = int(const MaskContext&, int, int, int, int);\n" +
           "extern \"C\" { extern Visible* const masks[] = {\n" + table + "};\n" +
           "extern Classify* const classes[] = {\n" + classes + "}; }\n";
  }

  struct Close {
    void operator()(void* library) const { dlclose(library); }
  };

  std::filesystem::path folder_;
  std::unique_ptr<void, Close> library_;
  Visible* const* functions_ = nullptr;
  Classify* const* classes_ = nullptr;
};

MaskContext context_of(const Mask& mask, const MaskScene& scene) {
  const mask::ProgramInput input = mask::bind_scene(operands_of(mask), scene);
  MaskContext context{input.request, input.q_len, input.kv_len, {}};
  if (input.operand.size() > kMaxOperands) throw std::length_error(mask.text());
  std::copy(input.operand.begin(), input.operand.end(), context.operand);
  return context;
}

void expect_definition(Visible& visible, const MaskContext& context, const Mask& mask, const MaskScene& scene,
                       int32_t query, int32_t key) {
  const int32_t q_pos = query + (scene.kv_len - scene.q_len);
  ASSERT_EQ(visible(context, q_pos, key, scene.q_head, query), is_visible(mask, scene, query, key))
      << mask.text() << " at query " << query << " of " << scene.q_len << ", key " << key << " of " << scene.kv_len;
}

// Every pair of a few random scenes, with operand values up to the ends of 32 bits.
void expect_definition_in_random_scenes(Visible& visible, const Mask& mask, std::mt19937& generator) {
  for (int32_t repeat = 0; repeat < 4; ++repeat) {
    RandomScene random(generator);
    random.add_operands(operands_of(mask));
    const MaskContext context = context_of(mask, random.scene);
    for (int32_t query = 0; query < random.scene.q_len; ++query) {
      for (int32_t key = 0; key < random.scene.kv_len; ++key) {
        expect_definition(visible, context, mask, random.scene, query, key);
      }
    }
  }
}

std::vector<Mask> draw_masks(int32_t count) {
  std::vector<Mask> masks;
  for (int32_t seed = 0; seed < count; ++seed) {
    std::mt19937 generator(seed);
    masks.push_back(RandomMask(generator).truth(seed % 5));
  }
  return masks;
}

std::vector<Mask> built_ins() {
  return {mask::everything(),
          mask::nothing(),
          mask::causal(),
          mask::window(3, 0),
          mask::window(-1, 2),
          mask::window(0, 0),
          mask::window(int64_t{1} << 31, 1),
          mask::sliding_window(4),
          mask::sliding_window(4, true),
          mask::rswa(3),
          mask::prefix_lm(),
          mask::prefix_lm(5),
          mask::prefix_lm(5, true),
          mask::per_request_causal(),
          mask::document(),
          mask::document() & mask::causal(),
          mask::tree()};
}

TEST(EmittedMasks, built_ins_equal_the_definition) {
  const std::vector<Mask> masks = built_ins();
  const CompiledMasks compiled(masks);
  std::mt19937 generator(1);
  for (size_t i = 0; i < masks.size(); ++i) {
    for (int32_t repeat = 0; repeat < 10; ++repeat) {
      expect_definition_in_random_scenes(compiled[i], masks[i], generator);
    }
  }
}

TEST(EmittedMasks, random_masks_equal_the_definition) {
  const std::vector<Mask> masks = draw_masks(500);
  const CompiledMasks compiled(masks);
  for (size_t i = 0; i < masks.size(); ++i) {
    std::mt19937 generator(static_cast<uint32_t>(i));
    expect_definition_in_random_scenes(compiled[i], masks[i], generator);
  }
}

// Random ranges: a full one has no hidden pair, an empty one no visible pair, for any head.
void expect_proofs_in_random_ranges(Classify& classify, const Mask& mask, std::mt19937& generator,
                                    std::array<int32_t, 3>& counts) {
  RandomScene random(generator);
  random.add_operands(operands_of(mask));
  MaskScene& scene = random.scene;
  if (scene.q_len == 0 || scene.kv_len == 0) return;
  const MaskContext context = context_of(mask, scene);
  const auto draw_range = [&](int32_t length) {
    const int32_t low = std::uniform_int_distribution<int32_t>(0, length - 1)(generator);
    return std::pair(low, std::uniform_int_distribution<int32_t>(low, length - 1)(generator));
  };
  for (int32_t repeat = 0; repeat < 8; ++repeat) {
    const auto [q_low, q_high] = draw_range(scene.q_len);
    const auto [kv_low, kv_high] = draw_range(scene.kv_len);
    const int32_t before = scene.kv_len - scene.q_len;
    const int32_t found = classify(context, q_low + before, q_high + before, kv_low, kv_high);
    ++counts.at(found);
    if (found == 1) continue;
    for (scene.q_head = 0; scene.q_head < 8; ++scene.q_head) {
      for (int32_t query = q_low; query <= q_high; ++query) {
        for (int32_t key = kv_low; key <= kv_high; ++key) {
          ASSERT_EQ(is_visible(mask, scene, query, key), found == 2) << mask.text();
        }
      }
    }
  }
}

TEST(EmittedMasks, classes_of_random_ranges_are_proofs) {
  std::vector<Mask> masks = draw_masks(500);
  for (const Mask& mask : built_ins()) masks.push_back(mask);
  const CompiledMasks compiled(masks);
  std::array<int32_t, 3> counts{};
  for (size_t i = 0; i < masks.size(); ++i) {
    std::mt19937 generator(static_cast<uint32_t>(i));
    for (int32_t repeat = 0; repeat < 4; ++repeat) {
      expect_proofs_in_random_ranges(compiled.classify(i), masks[i], generator, counts);
    }
  }
  EXPECT_GT(counts[0], 500);
  EXPECT_GT(counts[2], 500);
}

// Where single queries and keys bring no operands, a class is as sharp as the host's.
TEST(EmittedMasks, classes_of_built_ins_equal_those_of_the_host) {
  std::vector<Mask> masks;
  for (const Mask& mask : built_ins()) {
    const std::vector<OperandDeclaration> operands = operands_of(mask);
    const bool is_sharp = std::all_of(operands.begin(), operands.end(), [](const OperandDeclaration& operand) {
      return operand.scope == OperandScope::request;
    });
    if (is_sharp) masks.push_back(mask);
  }
  ASSERT_GE(masks.size(), 9U);
  const CompiledMasks compiled(masks);
  std::mt19937 generator(3);
  for (size_t i = 0; i < masks.size(); ++i) {
    RandomScene random(generator);
    random.scene.q_len = 9;
    random.scene.kv_len = 17;
    random.add_operands(operands_of(masks[i]));
    const MaskContext context = context_of(masks[i], random.scene);
    for (int32_t q_low = 0; q_low < 9; q_low += 3) {
      for (int32_t kv_low = 0; kv_low < 17; ++kv_low) {
        const TileClass expected = classify_tile(masks[i], random.scene, q_low, q_low + 3, kv_low, kv_low + 1);
        EXPECT_EQ(compiled.classify(i)(context, q_low + 8, q_low + 10, kv_low, kv_low), static_cast<int>(expected))
            << masks[i].text() << " queries from " << q_low << ", key " << kv_low;
      }
    }
  }
}

// Lengths, tokens and keys that an int just holds: sums of them that do not fit must not wrap.
TEST(EmittedMasks, positions_at_the_ends_of_31_bits_equal_the_definition) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  std::vector<Mask> masks;
  // Operands would need arrays of that length.
  for (const Mask& mask : draw_masks(2000)) {
    if (operands_of(mask).empty()) masks.push_back(mask);
  }
  ASSERT_GT(masks.size(), 300U);
  const CompiledMasks compiled(masks);
  for (const auto& [q_len, kv_len] : {std::pair{kMax, kMax}, {kMax, 1}, {kMax, 0}, {1, kMax}, {kMax, kMax - 1}}) {
    for (size_t i = 0; i < masks.size(); ++i) {
      MaskScene scene;
      scene.request = scene.q_head = static_cast<int32_t>(i) % 2 * kMax;
      scene.q_len = q_len;
      scene.kv_len = kv_len;
      const MaskContext context = context_of(masks[i], scene);
      for (const int32_t query : {0, q_len / 2, q_len - 1}) {
        for (const int32_t key : {0, kv_len / 2, kv_len - 1}) {
          if (key < 0 || key >= kv_len) continue;
          expect_definition(compiled[i], context, masks[i], scene, query, key);
        }
      }
    }
  }
}

TEST(EmittedMasks, text_of_a_small_mask) {
  const Mask mask =
      parse_mask("kv_pos <= q_pos & (q_pos - kv_pos < 3 | kv_pos < end[request]) & id[new_key] == id[query]");
  EXPECT_EQ(
      mask::emit_cuda(mask::compile(mask)),
      R"(__device__ __forceinline__ bool visible(const MaskContext& m, int q_pos, int kv_pos, int q_head, int query) {
  const int v0 = kv_pos;
  const int v1 = q_pos;
  const bool v2 = v0 <= v1;
  const long long v3 = (long long)v1 - (long long)v0;
  const int v4 = 3;
  const bool v5 = v3 < v4;
  const int v6 = m.operand[0][0];
  const bool v7 = v0 < v6;
  const bool v8 = v5 | v7;
  const bool v9 = v2 & v8;
  const int v10 = (kv_pos < m.kv_len - m.q_len ? 0 : m.operand[1][kv_pos - (m.kv_len - m.q_len)]);
  const int v11 = m.operand[1][query];
  const bool v12 = v10 == v11;
  const bool v13 = v9 & v12;
  return v13;
}
)");
}

TEST(EmittedMasks, equal_programs_give_equal_text) {
  const auto text = [](const char* mask) { return mask::emit_cuda(mask::compile(parse_mask(mask))); };
  EXPECT_EQ(text("causal"), text("true & kv_pos <= q_pos"));
  EXPECT_NE(text("causal"), text("kv_pos < q_pos"));
}

int32_t count_wide(const MaskValue& value) {
  const std::string text = mask::emit_cuda(mask::compile(value == mask::q_head()));
  int32_t count = 0;
  for (size_t at = text.find("const long long v"); at != std::string::npos;
       at = text.find("const long long v", at + 1)) {
    ++count;
  }
  return count;
}

TEST(EmittedMasks, arithmetic_is_wide_exactly_where_an_int_could_overflow) {
  constexpr int64_t kEnd = int64_t{1} << 31;
  const MaskValue q_pos = mask::q_pos(), kv_pos = mask::kv_pos(), kv_len = mask::kv_len();
  const MaskValue operand = mask::operand("of_request", OperandScope::request);

  // 0 … 2^31 - 1
  EXPECT_EQ(count_wide(kv_pos + 0), 0);
  EXPECT_EQ(count_wide(kv_pos + 1), 1);
  EXPECT_EQ(count_wide(kv_pos - (kEnd - 1)), 0);
  EXPECT_EQ(count_wide(kv_pos - kEnd), 1) << "the constant, not the difference";
  EXPECT_EQ(count_wide(kv_pos - kv_len), 0);
  EXPECT_EQ(count_wide(kv_pos + kv_len), 1);
  // -(2^31 - 1) … 2^31 - 1
  EXPECT_EQ(count_wide(q_pos - 1), 0);
  EXPECT_EQ(count_wide(q_pos - 2), 1);
  EXPECT_EQ(count_wide(q_pos + 1), 1);
  EXPECT_EQ(count_wide(q_pos - kv_pos), 1);
  // all of int
  EXPECT_EQ(count_wide(operand + 0), 0);
  EXPECT_EQ(count_wide(operand - 1), 1);
  EXPECT_EQ(count_wide(0 - operand), 1);
  EXPECT_EQ(count_wide(MaskValue(-1) - operand), 0);
  // constants
  EXPECT_EQ(count_wide(MaskValue(kEnd - 1)), 0);
  EXPECT_EQ(count_wide(MaskValue(kEnd)), 1);
  EXPECT_EQ(count_wide(MaskValue(-kEnd)), 0);
  EXPECT_EQ(count_wide(MaskValue(-kEnd - 1)), 1);
  // intervals know nothing of terms that cancel, and widen only from where it is needed
  EXPECT_EQ(count_wide((q_pos - kv_pos) + kv_pos), 2);
  EXPECT_EQ(count_wide((kv_pos - kv_len) - 1), 0);
  EXPECT_EQ(count_wide((kv_pos - kv_len) - 2), 1);
}

}  // namespace
}  // namespace qkv::test
