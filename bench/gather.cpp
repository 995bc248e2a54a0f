// Gathers of MLA's latents from pages in random order to dense rows, beside a device copy of as many bytes.
//   gather --device cuda               the kernel in graphs, and calls that plan and upload too
//   gather                             on the CPU
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "api/engines.hpp"
#include "bench/support/on_device.hpp"
#include "jit/driver.hpp"

namespace qkv::bench {
namespace {

struct Case {
  int32_t num_requests, num_keys, page_size;
  DType cache_dtype;
};

constexpr int32_t kLatentDim = 576;
constexpr int32_t kCalls = 10;

// Seconds a call, and the bytes that it reads and writes.
struct Times {
  double bytes, gather, gather_with_plan, copy;
};

Times time(const Case& shape, Device device, const Clock& clock) {
  const int32_t pages_each = (shape.num_keys - 1) / shape.page_size + 1, num_pages = shape.num_requests * pages_each;
  const int64_t num_rows = int64_t{shape.num_requests} * shape.num_keys;
  std::vector<int32_t> table(num_pages), cu_seq_lens(shape.num_requests + 1);
  std::vector<int32_t> starts(shape.num_requests, 0), lengths(shape.num_requests, shape.num_keys);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::minstd_rand(7));
  std::partial_sum(lengths.begin(), lengths.end(), cu_seq_lens.begin() + 1);

  const Buffer pages(device, shape.cache_dtype, {num_pages, shape.page_size, 1, kLatentDim});
  const Buffer rows(device, DType::bf16, {num_rows, 1, kLatentDim});
  const Buffer scale(device, DType::f32, {1});
  const Tensor given_scale = shape.cache_dtype == DType::bf16 ? Tensor{} : scale.view();
  const Tensor block_table = Tensor::of(table, {shape.num_requests, pages_each});
  const plan::Engine& engine = api::engine_of(device);
  plan::GatherPlan plan = plan::build_gather(block_table, 0, starts, lengths, shape.page_size);
  engine.place(plan, clock.stream());

  const auto gather = [&](int32_t) { engine.gather(pages.view(), plan, rows.view(), given_scale, clock.stream()); };
  const auto gather_with_plan = [&] {
    gather_cache(pages.view(), block_table, Tensor::of(starts, {shape.num_requests}),
                 Tensor::of(cu_seq_lens, {shape.num_requests + 1}), rows.view(), clock.stream(), given_scale);
  };
  const int64_t bytes = num_rows * kLatentDim * (size_bytes(shape.cache_dtype) + size_bytes(DType::bf16));
  const Buffer from(device, DType::i8, {bytes / 2}), to(device, DType::i8, {bytes / 2});
  const auto copy = [&](int32_t) {
    if (device.kind == DeviceKind::cpu) {
      std::memcpy(to.view().data, from.view().data, bytes / 2);
      return;
    }
    jit::check(jit::driver().memcpy_dtod_async(reinterpret_cast<jit::CUdeviceptr>(to.view().data),
                                               reinterpret_cast<jit::CUdeviceptr>(from.view().data), bytes / 2,
                                               static_cast<jit::CUstream>(clock.stream().handle)),
               "cuMemcpyDtoDAsync");
  };
  const auto seconds_of = [&](const auto& call) {
    call(0);
    if (device.kind == DeviceKind::cuda) return clock.median_in_graph(call, kCalls);
    return clock.median([&] { call(0); }, 3);
  };
  gather_with_plan();
  return {static_cast<double>(bytes), seconds_of(gather), clock.median(gather_with_plan, kCalls), seconds_of(copy)};
}

void run(const std::string& device_name, const std::string& out) {
  const Device device{device_name == "cuda" ? DeviceKind::cuda : DeviceKind::cpu, 0};
  const Clock clock(device, 0.5);
  nlohmann::json rows;
  fmt::print("latents of {} numbers to bf16 rows; us\n\n{:<34} {:>9} {:>9} {:>8} {:>12}\n", kLatentDim, "gather",
             "gather", "copy", "of copy", "with its plan");
  for (const DType dtype : {DType::bf16, DType::f8e4m3}) {
    for (const int32_t page_size : {16, 64}) {
      for (const auto& [num_requests, num_keys] : {std::pair(1, 32768), std::pair(64, 4096)}) {
        const Times times = time({num_requests, num_keys, page_size, dtype}, device, clock);
        const std::string name =
            fmt::format("{} x {}, page {}, {}", num_requests, num_keys, page_size, to_string(dtype));
        const double share = times.copy / times.gather;
        fmt::print("{:<34} {:>9.1f} {:>9.1f} {:>7.0f}% {:>12.1f}\n", name, times.gather * 1e6, times.copy * 1e6,
                   100 * share, times.gather_with_plan * 1e6);
        rows.push_back({{"case", name},
                        {"bytes", times.bytes},
                        {"gather_us", times.gather * 1e6},
                        {"with_plan_us", times.gather_with_plan * 1e6},
                        {"copy_us", times.copy * 1e6}});
      }
    }
  }
  if (out.empty()) return;
  const std::string path = out + "/gather.json";
  std::ofstream(path) << rows.dump(1) << "\n";
  fmt::print("\nwritten: {}\n", path);
}

}  // namespace
}  // namespace qkv::bench

int main(int argc, char** argv) {
  std::string device = "cpu", out;
  CLI::App app("Gathers of latents from pages, beside a copy of as many bytes");
  app.add_option("--device", device, "cpu or cuda")->capture_default_str()->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--out", out, "Folder for gather.json");
  CLI11_PARSE(app, argc, argv);
  try {
    qkv::bench::run(device, out);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
