// The qkv command.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "cache.hpp"
#include "check.hpp"
#include "mask.hpp"
#include "plan.hpp"
#include "qkv/device.hpp"
#include "qkv/layer.hpp"
#include "replay/command.hpp"
#include "warmup.hpp"

namespace {

int run(int argc, char** argv) {
  CLI::App app("qkv: the attention layer of a serving engine.", "qkv");
  app.require_subcommand(1);
  app.set_version_flag("--version", qkv::version());
  app.footer(
      "Examples:\n  qkv info\n  qkv check --cases 2000\n  qkv mask \"causal & window(3, 0)\" --q-len 12 --kv-len 12\n"
      "  qkv plan 64q1s8704p8k --device h200\n  qkv matrix\n  qkv replay trace.csv --limit 60");
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
