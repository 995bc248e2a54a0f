// One MLA layer of DeepSeek-V3's sizes over a long cached context: the whole chunk loop, timed beside one dense call
// over all keys plus the projection that makes them.
//
//   mla_prefill [device] [heads] [context] [new tokens] [workspace tokens]      mla_prefill cuda 128 32768 2048 8192
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "qkv/qkv.hpp"

namespace {

using qkv::DType;
using qkv::Tensor;

// bf16 tensors of random or unset numbers on either device.
class Memory {
 public:
  Memory(qkv::Device device, std::initializer_list<int64_t> shape, DType dtype = DType::bf16, float magnitude = 0) {
    tensor = Tensor::contiguous(nullptr, dtype, shape, device);
    const int64_t bytes = tensor.num_elements() * qkv::size_bytes(dtype);
    const bool on_host = device.kind == qkv::DeviceKind::cpu;
    if (on_host || magnitude != 0) host_.resize(static_cast<size_t>(bytes));
    if (magnitude != 0) fill(magnitude);
    if (!on_host) {
      device_ = qkv::DeviceMemory(device, bytes);
      if (magnitude != 0) device_.copy_from_host(host_.data());
    }
    tensor.data = on_host ? static_cast<void*>(host_.data()) : device_.data();
  }

  // Waits for all work before it; then the first `count` numbers.
  std::vector<float> first(int64_t count) {
    if (device_.data() != nullptr) {
      host_.resize(static_cast<size_t>(device_.num_bytes()));
      device_.copy_to_host(host_.data());
    }
    std::vector<float> values;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(host_.data())[i]) << 16;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      values.push_back(value);
    }
    return values;
  }

  Tensor tensor;

 private:
  void fill(float magnitude) {
    uint32_t state = 12345;
    auto* values = reinterpret_cast<uint16_t*>(host_.data());
    for (size_t i = 0; i < host_.size() / 2; ++i) {
      state = state * 1664525 + 1013904223;
      const float value = magnitude * (static_cast<float>(state >> 8) * 0x1p-23F - 1);
      uint32_t bits;
      std::memcpy(&bits, &value, sizeof bits);
      values[i] = static_cast<uint16_t>(bits >> 16);
    }
  }

  std::vector<std::byte> host_;
  qkv::DeviceMemory device_;
};

// Seconds of one call, the best of three. `wait` returns when the device is done.
template <class Run, class Wait>
double seconds_of(const Run& run, const Wait& wait) {
  double best = HUGE_VAL;
  run();  // compiles what is compiled at first use
  wait();
  for (int i = 0; i < 3; ++i) {
    const auto start = std::chrono::steady_clock::now();
    run();
    wait();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

int64_t argument(int argc, char** argv, int index, int64_t fallback) {
  if (argc <= index) return fallback;
  char* end = nullptr;
  const int64_t value = std::strtoll(argv[index], &end, 10);
  if (*end == '\0' && value > 0) return value;
  throw qkv::Error(qkv::ErrorCode::invalid_argument, "argument " + std::to_string(index), argv[index],
                   "a whole number above 0");
}

bool is_cuda(int argc, char** argv) {
  const std::string device = argc > 1 ? argv[1] : "cpu";
  if (device == "cpu" || device == "cuda") return device == "cuda";
  throw qkv::Error(qkv::ErrorCode::invalid_argument, "argument 1", device,
                   "cpu or cuda; behind it [heads] [context] [new tokens] [workspace tokens]");
}

void run(int argc, char** argv) {
  const bool on_gpu = is_cuda(argc, argv);
  const qkv::Device device{on_gpu ? qkv::DeviceKind::cuda : qkv::DeviceKind::cpu, 0};
  const int64_t heads = argument(argc, argv, 2, on_gpu ? 128 : 4);
  const int64_t context = argument(argc, argv, 3, on_gpu ? 32768 : 4096);
  const int64_t num_new = argument(argc, argv, 4, on_gpu ? 2048 : 256);
  const int64_t keys = context + num_new;
  constexpr int64_t kNope = 128, kRope = 64, kValue = 128, kRank = 512, kPage = 64;

  qkv::MlaSpec spec;
  spec.num_heads = static_cast<int32_t>(heads);
  spec.qk_nope_head_dim = kNope;
  spec.qk_rope_head_dim = kRope;
  spec.v_head_dim = kValue;
  spec.kv_lora_rank = kRank;
  spec.cache.page_size = kPage;
  const qkv::MlaPrefill prefill(spec, device);

  // One request: its context lies in pages 0, 1, …, its new tokens' latents are given.
  const int64_t pages = (keys + kPage - 1) / kPage;
  Memory matrix(device, {heads * (kNope + kValue), kRank}, DType::bf16, 0.08F);
  Memory cache(device, {pages, kPage, kRank + kRope}, DType::bf16, 1);
  Memory query(device, {num_new, heads, kNope + kRope}, DType::bf16, 1);
  const Tensor new_latents =
      Tensor::contiguous(static_cast<const std::byte*>(cache.tensor.data) + context * (kRank + kRope) * 2, DType::bf16,
                         {num_new, kRank + kRope}, device);
  const qkv::Projection project = qkv::matrix_projection(spec, matrix.tensor);

  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  const std::vector<int32_t> query_start_loc = {0, static_cast<int32_t>(num_new)};
  const std::vector<int32_t> seq_lens = {static_cast<int32_t>(keys)};
  qkv::Batch batch;
  batch.query_start_loc = Tensor::of(query_start_loc, {2});
  batch.seq_lens = Tensor::of(seq_lens, {1});
  batch.block_table = Tensor::of(table, {1, pages});
  qkv::ContextChunkOptions options;
  options.page_size = kPage;
  options.workspace_tokens =
      static_cast<int32_t>(argument(argc, argv, 5, qkv::default_workspace_tokens(options, keys, 1)));
  const qkv::MlaPlan plan = prefill.plan(batch, options);

  Memory out(device, {num_new, heads, kValue});
  Memory probe(device, {1});
  const auto wait = [&] { probe.first(1); };
  const std::vector<float> chunked = [&] {
    Memory workspace(device, {plan.workspace_bytes() / 4}, DType::f32);
    const auto forward = [&] {
      prefill.forward(query.tensor, new_latents, cache.tensor, plan, project, workspace.tensor, out.tensor);
    };
    std::printf("%zu chunks, workspace %.2f GB: %.3f ms\n", plan.chunks().size(),
                static_cast<double>(plan.workspace_bytes()) * 1e-9, 1e3 * seconds_of(forward, wait));
    return out.first(num_new * heads * kValue);
  }();

  // All keys at once.
  Memory key(device, {keys, heads, kNope + kRope});
  Memory value(device, {keys, heads, kValue});
  const Tensor latents = Tensor::strided(cache.tensor.data, DType::bf16, {keys, kRank}, {kRank + kRope, 1}, device);
  const Tensor rope =
      Tensor::strided(static_cast<const std::byte*>(cache.tensor.data) + kRank * 2, DType::bf16,
                      {pages, kPage, heads, kRope}, {kPage * (kRank + kRope), kRank + kRope, 0, 1}, device);
  const std::vector<int32_t> starts = {0};
  const std::vector<int32_t> cu_seq_lens = {0, static_cast<int32_t>(keys)};
  qkv::gather_cache(rope, batch.block_table, Tensor::of(starts, {1}), Tensor::of(cu_seq_lens, {2}),
                    key.tensor.slice(2, kNope, kNope + kRope));
  const auto expand = [&] { project({latents, key.tensor.slice(2, 0, kNope), value.tensor, {}}); };
  const double projection_seconds = seconds_of(expand, wait);

  qkv::LayerSpec layer;
  layer.num_q_heads = layer.num_kv_heads = spec.num_heads;
  layer.head_dim = kNope + kRope;
  layer.head_dim_v = kValue;
  layer.query_dtype = layer.kv_dtype = DType::bf16;
  const qkv::Attention attention(layer, device);
  batch.block_table = {};
  const qkv::Plan dense_plan = attention.plan(batch);
  const double dense_seconds =
      seconds_of([&] { attention.forward(query.tensor, key.tensor, value.tensor, dense_plan, out.tensor); }, wait);
  // GFLOP/s of the multiply-adds that count: hidden pairs are none.
  const double pairs = static_cast<double>(num_new) * (context + 0.5 * (num_new + 1)) * heads;
  std::printf("one dense call %.3f ms (%.0f GFLOP/s) + projection %.3f ms (%.0f GFLOP/s) = %.3f ms\n",
              1e3 * dense_seconds, 2e-9 * pairs * (kNope + kRope + kValue) / dense_seconds, 1e3 * projection_seconds,
              2e-9 * keys * kRank * heads * (kNope + kValue) / projection_seconds,
              1e3 * (dense_seconds + projection_seconds));

  const std::vector<float> dense = out.first(num_new * heads * kValue);
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < dense.size(); ++i) {
    difference += std::pow(chunked[i] - dense[i], 2);
    size += std::pow(dense[i], 2);
  }
  std::printf("relative difference of the results: %.1e\n", std::sqrt(difference / size));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc, argv);
    return 0;
  } catch (const qkv::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
