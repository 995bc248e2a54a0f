// Rows of a benchmark suite. Each row is one case: qkv, its peers and the measured limit, all in one unit and one run,
// their repetitions interleaved; of each the best repetition counts.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace qkv::bench {

// One call of `run` does `work` units of the row's unit times seconds (GFLOP for GFLOP/s, GB for GB/s).
struct Contestant {
  std::string name;  // "qkv", "limit", or a peer's name
  double work;
  std::function<void()> run;
};

class Suite {
 public:
  explicit Suite(std::string name) : name_(std::move(name)) {}

  // `make` is called when the row's turn comes and its result destroyed afterwards, so that big inputs do not pile up.
  using Make = std::function<std::vector<Contestant>()>;
  void add_case(std::string name, std::string unit, Make make);

  // Runs all cases whose names match --filter (a regular expression), prints the table and writes
  // <out>/<device>/<suite>.json. Returns the exit status.
  int run(int argc, char** argv);

 private:
  struct Case {
    std::string name;
    std::string unit;
    Make make;
  };
  std::string name_;
  std::vector<Case> cases_;
};

}  // namespace qkv::bench
