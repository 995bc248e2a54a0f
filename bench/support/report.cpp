#include "bench/support/report.hpp"

#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>

#include "qkv/device.hpp"

namespace qkv::bench {
namespace {

// Keeps the best rate of each contestant; prints nothing itself.
class BestRates : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type != Run::RT_Iteration) continue;
      double& best = rates[run.run_name.function_name];
      best = std::max(best, static_cast<double>(run.counters.at("rate").value));
    }
  }
  std::map<std::string, double> rates;
};

std::map<std::string, double> measure(const std::vector<Contestant>& contestants, int repetitions) {
  benchmark::ClearRegisteredBenchmarks();
  for (const Contestant& contestant : contestants) {
    contestant.run();  // first touch, packed buffers, thread start
    benchmark::RegisterBenchmark(contestant.name.c_str(),
                                 [&contestant](benchmark::State& state) {
                                   for (auto _ : state) contestant.run();
                                   state.counters["rate"] = benchmark::Counter(
                                       contestant.work, benchmark::Counter::kIsIterationInvariantRate);
                                 })
        ->UseRealTime()
        ->MinTime(0.15)
        ->Repetitions(repetitions);
  }
  BestRates best;
  benchmark::RunSpecifiedBenchmarks(&best);
  return best.rates;
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "cpu";
}

// "intel-xeon-processor-2-threads-avx512"
std::string device_name() {
  std::string name = fmt::format("{} {} threads {}", cpu_model(), num_threads(), instruction_set_in_use());
  name = std::regex_replace(name, std::regex("\\([^)]*\\)|@.*GHz"), "");
  name = std::regex_replace(name, std::regex("[^A-Za-z0-9]+"), "-");
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name;
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));  // NOLINT(concurrency-mt-unsafe): one thread
  return text;
}

void print_row(const nlohmann::json& row) {
  const double own = row["qkv"];
  fmt::print("{:<48} {:>8.1f} {:<8}", row["case"].get<std::string>(), own, row["unit"].get<std::string>());
  if (!row["limit"].is_null())
    fmt::print(" {:>4.0f} % of {:.1f}", 100 * own / row["limit"].get<double>(), row["limit"].get<double>());
  for (const auto& [peer, rate] : row["peers"].items()) {
    fmt::print("   {:.2f} x {} ({:.1f})", own / rate.get<double>(), peer, rate.get<double>());
  }
  fmt::print("\n");
  std::fflush(stdout);
}

}  // namespace

void Suite::add_case(std::string name, std::string unit, Make make) {
  cases_.push_back({std::move(name), std::move(unit), std::move(make)});
}

int Suite::run(int argc, char** argv) {
  std::string filter = ".*";
  std::string out = "bench/results";
  std::string commit = "unknown";
  int repetitions = 7;
  CLI::App app("qkv benchmarks, suite " + name_ + ": qkv, its peers and the measured limit, side by side.");
  app.add_option("--filter", filter, "Regular expression over case names")->capture_default_str();
  app.add_option("--out", out, "Folder of results; the device's name and the suite's are added")->capture_default_str();
  app.add_option("--commit", commit, "Commit that is written into the rows")->capture_default_str();
  app.add_option("--repetitions", repetitions, "Interleaved repetitions; the best counts")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  std::string program = "bench";
  std::string interleave = "--benchmark_enable_random_interleaving=true";
  char* arguments[] = {program.data(), interleave.data()};
  int count = 2;
  benchmark::Initialize(&count, arguments);

  fmt::print("{} · {} · best of {} interleaved repetitions\n", name_, device_name(), repetitions);
  nlohmann::json rows = nlohmann::json::array();
  const std::regex wanted(filter);
  for (const Case& one : cases_) {
    if (!std::regex_search(one.name, wanted)) continue;
    std::map<std::string, double> rates = measure(one.make(), repetitions);
    nlohmann::json row = {{"case", one.name},
                          {"unit", one.unit},
                          {"higher_is_better", true},
                          {"qkv", rates.at("qkv")},
                          {"peers", nlohmann::json::object()},
                          {"limit", nullptr},
                          {"commit", commit},
                          {"date", today()}};
    for (const auto& [name, rate] : rates) {
      if (name == "limit") row["limit"] = rate;
      if (name != "qkv" && name != "limit") row["peers"][name] = rate;
    }
    print_row(row);
    rows.push_back(std::move(row));
  }
  const std::filesystem::path folder = std::filesystem::path(out) / device_name();
  std::filesystem::create_directories(folder);
  std::ofstream(folder / (name_ + ".json")) << rows.dump(2) << "\n";
  fmt::print("written: {}\n", (folder / (name_ + ".json")).string());
  return 0;
}

}  // namespace qkv::bench
