// The qkv command.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "cache.hpp"
#include "check.hpp"
#include "mask.hpp"
#include "plan.hpp"
#include "qkv/device.hpp"
#include "qkv/layer.hpp"
#include "replay/command.hpp"
#include "warmup.hpp"

namespace {

std::vector<std::string> names_of_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

// Of a word that is not known, or a command that is missing: what was given, and what is allowed there.
std::string failure_message(const CLI::App* app, const CLI::Error& error) {
  const CLI::App* place = app;
  std::string path = app->get_name();
  while (!place->get_subcommands().empty()) {
    place = place->get_subcommands().front();
    path += " " + place->get_name();
  }
  const std::vector<std::string> unknown = app->remaining(true);
  const std::vector<std::string> commands = names_of_commands(*place);
  const bool lacks_command = error.get_name() == "RequiredError" && !commands.empty();
  if (unknown.empty() && !lacks_command) return CLI::FailureMessage::simple(app, error);
  const auto option = std::find_if(unknown.begin(), unknown.end(), [](const auto& word) { return word[0] == '-'; });
  const std::string word = unknown.empty() ? "no command" : option != unknown.end() ? *option : unknown.front();
  return fmt::format("{}: got {}; allowed: {}what {} --help lists\n", path, word,
                     commands.empty() ? "" : fmt::format("{}, and ", fmt::join(commands, ", ")), path);
}

int run(int argc, char** argv) {
  CLI::App app("qkv: the attention layer of a serving engine.", "qkv");
  app.require_subcommand(1);
  app.set_version_flag("--version", qkv::version());
  app.add_subcommand("info", "What the library found on this machine, and the settings in force")->callback([] {
    fmt::print("{}", qkv::info());
  });
  std::string matrix_device = "cpu";
  CLI::App* matrix =
      app.add_subcommand("matrix", "Which features combine, printed from the rules that creating a layer runs");
  matrix->add_option("--device", matrix_device, "Kind of device; none need be there")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  matrix->callback([&] {
    const auto kind = matrix_device == "cuda" ? qkv::DeviceKind::cuda : qkv::DeviceKind::cpu;
    fmt::print("{}", qkv::support_matrix(kind));
  });
  qkv::tools::add_cache_command(app);
  qkv::tools::add_check_command(app);
  qkv::tools::add_mask_command(app);
  qkv::tools::add_plan_command(app);
  qkv::replay::add_replay_command(app);
  qkv::tools::add_warmup_command(app);
  qkv::tools::add_why_command(app);
  // Last, since a command begins with the footer that the program has.
  app.footer(
      "Examples:\n  qkv info\n  qkv check --cases 2000\n  qkv mask \"causal & window(3, 0)\" --q-len 12 --kv-len 12\n"
      "  qkv plan 64q1s8704p8k --device h200\n  qkv matrix\n  qkv replay trace.csv --limit 60\n  qkv warmup --model "
      "config.json --arch sm_90a");
  app.failure_message(&failure_message);
  CLI11_PARSE(app, argc, argv);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {  // a qkv::Error, say: a value that the library refuses
    std::fprintf(stderr, "qkv: %s\n", error.what());
    return 2;
  }
}
