#include "mask.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "number.hpp"
#include "qkv/mask.hpp"
#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

constexpr int32_t kTerminalQueries = 64;
constexpr int32_t kTerminalKeys = 160;
constexpr int64_t kMaxTiles = 4000000;  // a few seconds

struct MaskArguments {
  std::string expression;
  int32_t q_len = 12;
  int32_t kv_len = -1;  // not given: q_len
  int32_t request = 0;
  int32_t head = 0;
  std::vector<std::string> operands;  // name=values
  int32_t tile_q = 0;                 // 0: chosen by size
  int32_t tile_kv = 0;
  std::string png;
};

[[noreturn]] void refuse(std::string argument, std::string value, std::string allowed) {
  throw Error(ErrorCode::invalid_argument, std::move(argument), std::move(value), std::move(allowed));
}

// "7" is one value, "7*16" are sixteen.
void append_values(const std::string& name, std::string_view term, std::vector<int32_t>& values) {
  const auto fail = [&] {
    refuse("--operand " + name, fmt::format("\"{}\"", term), "a 32-bit integer, or value*count");
  };
  const auto read = [&](std::string_view digits) {
    int32_t number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    if (error != std::errc() || end != digits.data() + digits.size()) fail();
    return number;
  };
  const size_t star = term.find('*');
  const int32_t count = star == std::string_view::npos ? 1 : read(term.substr(star + 1));
  if (count < 0) fail();
  values.insert(values.end(), count, read(term.substr(0, star)));
}

using OperandValues = std::map<std::string, std::vector<int32_t>>;

OperandValues read_operands(const std::vector<std::string>& arguments) {
  OperandValues operands;
  for (const std::string& argument : arguments) {
    const size_t equals = argument.find('=');
    if (equals == std::string::npos) refuse("--operand", argument, "name=value,value,… or name=value*count,…");
    const std::string name = argument.substr(0, equals);
    std::vector<int32_t>& values = operands[name];
    for (size_t begin = equals + 1; begin < argument.size();) {
      const size_t end = std::min(argument.find(',', begin), argument.size());
      append_values(name, std::string_view(argument).substr(begin, end - begin), values);
      begin = end + 1;
    }
  }
  return operands;
}

struct Need {
  int64_t length;
  std::string_view meaning;
};

Need need_of(OperandScope scope, const MaskScene& scene) {
  switch (scope) {
    case OperandScope::request:
      return {int64_t{scene.request} + 1, "one a request"};
    case OperandScope::key:
      return {scene.kv_len, "one a key"};
    default:
      return {scene.q_len, "one a new token"};
  }
}

// Lists what the mask reads; returns where other numbers of values are given, in one line.
std::string print_operands(const Mask& mask, const MaskScene& scene, const OperandValues& given) {
  std::string wrong;
  for (const OperandDeclaration& declaration : operands_of(mask)) {
    const Need need = need_of(declaration.scope, scene);
    const auto values = given.find(declaration.name);
    const size_t count = values == given.end() ? 0 : values->second.size();
    fmt::print("operand   {}: needs {} ({}), given {}\n", declaration.name, need.length, need.meaning, count);
    if (static_cast<int64_t>(count) == need.length) continue;
    if (!wrong.empty()) wrong += ", ";
    wrong += fmt::format("{} values of {}, which needs {} ({})", count, declaration.name, need.length, need.meaning);
  }
  return wrong;
}

void check_names(const Mask& mask, const OperandValues& given) {
  const std::vector<OperandDeclaration> declared = operands_of(mask);
  for (const auto& [name, values] : given) {
    const bool is_used =
        std::any_of(declared.begin(), declared.end(),
                    [&, &name = name](const OperandDeclaration& operand) { return operand.name == name; });
    if (!is_used) refuse("--operand", name, "the names of operands that the mask reads");
  }
}

void print_tiles(const Mask& mask, const MaskScene& scene, int32_t tile_q, int32_t tile_kv) {
  const int64_t rows = (int64_t{scene.q_len} + tile_q - 1) / tile_q;
  const int64_t columns = (int64_t{scene.kv_len} + tile_kv - 1) / tile_kv;
  if (rows * columns == 0) return;
  if (rows * columns > kMaxTiles) {
    fmt::print("tiles     {} of {} x {}: too many to count, give larger --tile-q and --tile-kv\n", rows * columns,
               tile_q, tile_kv);
    return;
  }
  std::array<int64_t, 3> counts{};
  int64_t skipped_keys = 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const auto q = static_cast<int32_t>(row * tile_q);
      const auto kv = static_cast<int32_t>(column * tile_kv);
      const int32_t q_end = q + std::min(tile_q, scene.q_len - q);
      const int32_t kv_end = kv + std::min(tile_kv, scene.kv_len - kv);
      const TileClass tile_class = classify_tile(mask, scene, q, q_end, kv, kv_end);
      ++counts[static_cast<size_t>(tile_class)];
      if (tile_class == TileClass::empty) skipped_keys += kv_end - kv;
    }
  }
  fmt::print("tiles     {} of {} queries x {} keys: {} empty, {} partial, {} full; {:.1f} % of the keys are skipped\n",
             rows * columns, tile_q, tile_kv, counts[0], counts[1], counts[2],
             100.0 * static_cast<double>(skipped_keys) / static_cast<double>(rows * scene.kv_len));
}

void run(const MaskArguments& arguments) {
  const Mask mask = parse_mask(arguments.expression);
  const OperandValues operands = read_operands(arguments.operands);
  MaskScene scene;
  scene.request = arguments.request;
  scene.q_head = arguments.head;
  scene.q_len = arguments.q_len;
  scene.kv_len = arguments.kv_len < 0 ? arguments.q_len : arguments.kv_len;

  fmt::print("mask      {}\nhash      {:016x}\n", mask.text(), mask.hash());
  const std::string wrong = print_operands(mask, scene, operands);
  check_names(mask, operands);
  if (!wrong.empty()) refuse("--operand", wrong, "so many values, each operand as --operand name=value,value*count,…");
  for (const auto& [name, values] : operands) {
    const auto count = static_cast<int64_t>(values.size());
    scene.operands.push_back({name, Tensor::contiguous(values.data(), DType::i32, {count})});
  }

  const bool fits = scene.q_len <= kTerminalQueries && scene.kv_len <= kTerminalKeys;
  const int32_t tile_q = arguments.tile_q > 0 ? arguments.tile_q : fits ? 4 : 64;
  const int32_t tile_kv = arguments.tile_kv > 0 ? arguments.tile_kv : fits ? 4 : 128;
  print_tiles(mask, scene, tile_q, tile_kv);
  if (fits) {
    fmt::print("\n{}", draw_mask_text(mask, scene, tile_q, tile_kv));
  } else if (arguments.png.empty()) {
    fmt::print("picture   {} x {} pairs are too many for a terminal; --png FILE draws them\n", scene.q_len,
               scene.kv_len);
  }
  if (!arguments.png.empty()) {
    draw_mask_png(mask, scene, arguments.png, tile_q, tile_kv);
    fmt::print("picture   {}\n", arguments.png);
  }
}

constexpr const char* kExamples =
    R"help(Expressions: integers; q_pos kv_pos q_head request q_len kv_len; operands as name[request], name[query],
name[new_key], name[key]; + -; < <= > >= == !=; ~ & | ( ); true false; and the built-ins causal,
window(left, right), sliding_window(tokens), rswa(tokens), prefix_lm, prefix_lm(left, clamp), document, tree,
per_request_causal.

In the picture a row is a query and a column a key: '#' visible, '.' hidden. A tile's corner shows its class:
'=' full (no mask is evaluated), '+' partial, ' ' empty (keys and values are never read).

Examples:
  qkv mask "causal & window(3, 0)" --q-len 12
  qkv mask "causal & sliding_window(128)" --q-len 512 --kv-len 4096 --png window.png
  qkv mask "rswa(4)" --q-len 3 --kv-len 24 --operand prefix_len=9
  qkv mask "document & causal" --q-len 12 --operand query_document=0*5,1*7 --operand key_document=0*5,1*7
  qkv mask "prefix_lm(3)" --q-len 12 --operand span_start=-1*4,4*5,-1*3 --operand span_end=-1*4,8*5,-1*3)help";

}  // namespace

void add_mask_command(CLI::App& app) {
  const auto arguments = std::make_shared<MaskArguments>();
  CLI::App* command = app.add_subcommand("mask", "Print, classify and draw a mask expression");
  command->add_option("expression", arguments->expression, "The mask, for example \"causal & window(127, 0)\"")
      ->required();
  command->add_option("--q-len", arguments->q_len, "New tokens of the request")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--kv-len", arguments->kv_len, "Keys of the request, cached and new; default: --q-len")
      ->check(whole_number(0));
  command->add_option("--request", arguments->request, "Index of the request")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--head", arguments->head, "Query head")->check(whole_number(0))->capture_default_str();
  command
      ->add_option("--operand", arguments->operands,
                   "An operand's values, name=1,2,3 or name=value*count,…; once for each operand")
      ->allow_extra_args(false);
  command->add_option("--tile-q", arguments->tile_q, "Queries a tile; default: 4 in small pictures, else 64")
      ->check(whole_number(1));
  command->add_option("--tile-kv", arguments->tile_kv, "Keys a tile; default: 4 in small pictures, else 128")
      ->check(whole_number(1));
  command->add_option("--png", arguments->png, "Also draw the mask to this file");
  command->footer(kExamples);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace qkv::tools
