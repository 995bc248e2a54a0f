#include "check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <optional>
#include <thread>

#include "case_data.hpp"
#include "mla_cases.hpp"
#include "number.hpp"
#include "parallel_cases.hpp"
#include "progress.hpp"
#include "qkv/attention.hpp"
#include "qkv/device.hpp"
#include "qkv/ops.hpp"
#include "qkv/reference.hpp"
#include "qkv/status.hpp"

namespace qkv::tools {

double rounding_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f16:
      return 0x1p-11;
    case DType::f8e4m3:
      return 0x1.01p-4;
    case DType::f8e5m2:
      return 0x1.01p-3;
    default:
      return 1e-5;
  }
}

StoredRange stored_range(DType dtype) {
  if (dtype == DType::f8e4m3) return {448, 0x1p-10};
  if (dtype == DType::f8e5m2) return {57344, 0x1p-17};
  if (dtype == DType::i8) return {127, 0.5};
  return {};
}

double scale_at(const Tensor& out_scale, int64_t token, int64_t head, int64_t column) {
  if (!out_scale.is_given()) return 1;
  return out_scale.rank == 1 ? load(out_scale, {0}) : load(out_scale, {token, head, column / kScaleGroup});
}

std::string wrong_scale(double scale, DType dtype, const double* expected, int64_t begin, int64_t end, double absolute,
                        double relative) {
  double largest = 0;
  for (int64_t d = begin; d < end; ++d) {
    if (std::isfinite(expected[d])) largest = std::max(largest, std::fabs(expected[d]));
  }
  const double got = scale * stored_range(dtype).largest;
  if (std::fabs(got - largest) <= absolute + relative * largest) return "";
  if (largest <= absolute && scale == 1) return "";  // of zeros
  return fmt::format("scale of columns {} to {}: got {}, expected {}", begin, end - 1, scale,
                     largest / stored_range(dtype).largest);
}

namespace {

// How far a result may be from the oracle's: an absolute part for what sums lose, and a relative one for what rounding
// the result to its dtype adds. The GPU engine also rounds the softmax's weights to the queries' dtype. What that moves
// is measured by the size of the row where values are not of size 1: in 8-bit caches they reach hundreds, and may
// cancel each other. Weights of 8 bits are off by up to 2^-4 of each: independent errors, which a mean of many values
// averages as it does the values.
struct Tolerance {
  double out;
  double out_relative;
  double lse;
  double of_row = 0;  // of the root mean square of a row's expected output
};

// The largest bias that ALiBi subtracts from a score. Rounding a score of that size to f32 moves its weight by as much.
double largest_bias(const Case& c) {
  int32_t distance = 0;
  for (const RequestLengths& request : c.requests) distance = std::max({distance, request.q_len, request.kv_len});
  constexpr double kSlopeOfBatches = 0.5;  // case_data.cpp draws no larger one
  double slope = c.layer.alibi_per_request ? kSlopeOfBatches : 0;
  for (const float of_head : c.layer.alibi_slopes) slope = std::max<double>(slope, of_head);
  return slope * distance;
}

Tolerance tolerance_of(const Case& c, Device device) {
  const LayerSpec& layer = c.layer;
  const DType out = layer.out_dtype();
  const double rounding = rounding_of(out);
  if (device.kind == DeviceKind::cpu) return {5e-5 + largest_bias(c) * 0x1p-24, rounding, 5e-5};
  if (is_float8(layer.query_dtype)) return {2e-3, rounding + 1e-3, 1e-2, 0.25};
  const double of_weights = layer.query_dtype == DType::bf16 ? 1e-2 : 2e-3;
  return {of_weights, rounding + of_weights / 2, 1e-3, is_8bit(layer.kv_dtype) ? of_weights / 4 : 0};
}

bool agree(double got, double expected, double absolute, double relative) {
  if (std::isnan(expected) || std::isnan(got)) return std::isnan(expected) && std::isnan(got);
  if (std::isinf(expected) || std::isinf(got)) return got == expected;
  return !(std::fabs(got - expected) > absolute + relative * std::fabs(expected));
}

// Of the finite numbers: a NaN or an infinity says nothing of the others.
double root_mean_square(const double* row, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::isfinite(row[i]) ? row[i] * row[i] : 0;
  return std::sqrt(sum / static_cast<double>(count));
}

Outputs make_outputs(const Case& c, const CaseData& data, int64_t num_tokens) {
  Outputs outputs;
  outputs.scale = data.output_scale(num_tokens + c.extra_rows, c.layer.num_q_heads);
  outputs.out = OwnedTensor(c.layer.out_dtype(), {num_tokens + c.extra_rows, c.layer.num_q_heads, c.layer.value_dim()});
  if (c.with_lse) outputs.lse = OwnedTensor(DType::f32, {c.layer.num_q_heads, num_tokens + c.extra_rows});
  return outputs;
}

}  // namespace

std::string difference(const Case& c, Device device, const Tensor& out, const Tensor& lse,
                       const reference::Result& expected, const Tensor& out_scale, double further) {
  const Tolerance tolerance = tolerance_of(c, device);
  const StoredRange range = stored_range(c.layer.out_dtype());
  const double relative_of_scale = tolerance.out_relative - rounding_of(c.layer.out_dtype()) + 1e-6;
  const int64_t dim = c.layer.value_dim();
  int64_t num_tokens = 0;
  for (const RequestLengths& request : c.requests) num_tokens += request.q_len;
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < c.layer.num_q_heads; ++h) {
      const double* row = &expected.out[(t * c.layer.num_q_heads + h) * dim];
      double absolute = tolerance.out + further;
      if (tolerance.of_row > 0) absolute += tolerance.of_row * root_mean_square(row, dim);
      for (int64_t d = 0; d < dim; ++d) {
        const double scale = scale_at(out_scale, t, h, d);
        if (out_scale.rank == 3 && d % kScaleGroup == 0) {
          const std::string wrong = wrong_scale(scale, c.layer.out_dtype(), row, d, std::min(d + kScaleGroup, dim),
                                                absolute, relative_of_scale);
          if (!wrong.empty()) return fmt::format("out[{}, {}]: {}", t, h, wrong);
        }
        const double got = load(out, {t, h, d}) * scale;
        const double exact = row[d];
        const double limit = range.largest * scale;
        const double want = std::isnan(exact) ? exact : std::clamp(exact, -limit, limit);
        if (!agree(got, want, absolute + range.half_smallest * scale, tolerance.out_relative)) {
          return fmt::format("out[{}, {}, {}]: got {}, expected {}", t, h, d, got, want);
        }
      }
      if (!lse.is_given()) continue;
      const double got = load(lse, {h, t});
      const double want = expected.lse[h * num_tokens + t];
      if (!agree(got, want, tolerance.lse, 1e-5))
        return fmt::format("lse[{}, {}]: got {}, expected {}", h, t, got, want);
    }
  }
  return "";
}

namespace {

class CaseRun {
 public:
  CaseRun(const Case& c, Device device)
      : case_(c),
        layer_(c.layer),
        device_(device),
        data_(c),
        attention_(c.layer, device),
        query_(data_.query, device),
        key_(data_.key, device),
        value_(data_.value, device),
        key_pages_(data_.key_pages, device),
        value_pages_(data_.value_pages, device),
        key_scale_(data_.key_scale, device),
        value_scale_(data_.value_scale, device),
        query_scale_(data_.query_scale, device) {}

  std::string run() {
    const Batch batch = data_.batch();
    const Plan plan = attention_.plan(batch);
    if (layer_.cache) {
      if (std::string wrong = update_cache(plan); !wrong.empty()) return wrong;
    }
    Outputs outputs = make_outputs(case_, data_, data_.num_tokens);
    forward(query_.view(), plan, {}, outputs);
    const reference::Result expected =
        layer_.cache ? reference::attention(layer_, batch, data_.query.view(), data_.cache(), data_.query_scale.view())
                     : reference::attention(layer_, batch, data_.query.view(), data_.key.view(), data_.value.view(),
                                            data_.query_scale.view(), data_.key_scale.view(), data_.value_scale.view());
    if (std::string wrong = compare(outputs, expected); !wrong.empty()) return wrong;
    return compare_each_request_alone(outputs);
  }

 private:
  // One request of the batch, alone.
  struct Alone {
    std::optional<int64_t> request = {};
    int64_t first_row = 0;  // of dense keys
  };

  void forward(const Tensor& query, const Plan& plan, const Alone& alone, Outputs& outputs) {
    const Placed out(outputs.out, device_);
    const Placed lse(outputs.lse, device_);
    const Placed scale(outputs.scale, device_);
    Tensor query_scale = query_scale_.view();
    if (alone.request && query_scale.rank == 2) {
      query_scale = query_scale.slice(0, *alone.request, *alone.request + 1);
    }
    KvCache own = layer_.cache ? cache() : KvCache{key_.view(), value_.view(), key_scale_.view(), value_scale_.view()};
    if (alone.request && layer_.kv_scales == KvScales::per_request_head) {
      for (Tensor* of : {&own.key_scale, &own.value_scale}) *of = of->slice(0, *alone.request, *alone.request + 1);
    }
    if (layer_.cache) {
      attention_.forward(query, own, plan, out.view(), lse.view(), {}, scale.view(), query_scale);
    } else {
      const auto from_first = [&](Tensor& rows) { rows = rows.slice(0, alone.first_row, rows.shape[0]); };
      for (Tensor* rows : {&own.key, &own.value}) from_first(*rows);
      if (layer_.kv_scales == KvScales::per_token_head) {
        for (Tensor* rows : {&own.key_scale, &own.value_scale}) from_first(*rows);
      }
      attention_.forward(query, own.key, own.value, plan, out.view(), lse.view(), {}, scale.view(), query_scale,
                         own.key_scale, own.value_scale);
    }
    out.fetch();
    scale.fetch();
    if (case_.with_lse) lse.fetch();
  }

  // Interleaved caches hold keys and values in one tensor.
  KvCache cache() {
    const Placed& values = case_.layout.interleaved ? key_pages_ : value_pages_;
    return {key_pages_.on_device(data_.key_cache), values.on_device(data_.value_cache), key_scale_.view(),
            value_scale_.view()};
  }

  // The cache after the call must be the cache before it, with the new tokens' rows in their slots, byte for byte.
  std::string update_cache(const Plan& plan) {
    CaseData expected(case_);
    for (size_t t = 0; t < data_.slot_mapping.size(); ++t) {
      const int64_t slot = data_.slot_mapping[t];
      if (slot < 0) continue;
      for (int64_t h = 0; h < layer_.num_kv_heads; ++h) {
        const auto write = [&](const OwnedTensor& source, const Tensor& pages, OwnedTensor& scales) {
          write_row(data_, layer_, source.view(), static_cast<int64_t>(t), slot, h, pages, scales);
        };
        write(data_.key, expected.key_cache, expected.key_scale);
        write(data_.value, expected.value_cache, expected.value_scale);
      }
    }
    attention_.update_cache(key_.view(), value_.view(), cache(), plan);
    key_pages_.fetch();
    if (!case_.layout.interleaved) value_pages_.fetch();
    key_scale_.fetch();
    value_scale_.fetch();
    const bool same_scales = data_.key_scale.buffer() == expected.key_scale.buffer() &&
                             data_.value_scale.buffer() == expected.value_scale.buffer();
    if (!same_scales) return "update_cache: the scales differ from those expected";
    const bool same = data_.key_pages.buffer() == expected.key_pages.buffer() &&
                      data_.value_pages.buffer() == expected.value_pages.buffer();
    return same ? "" : "update_cache: the cache's bytes differ from those expected";
  }

  std::string compare(const Outputs& outputs, const reference::Result& expected) const {
    if (!outputs.out.buffer().guards_intact()) return "out: guard words overwritten";
    if (case_.with_lse && !outputs.lse.buffer().guards_intact()) return "lse: guard words overwritten";
    const Tensor lse = case_.with_lse ? outputs.lse.view() : Tensor{};
    const Tensor scale = outputs.scale.view();
    if (scale.is_given() && !outputs.scale.buffer().guards_intact()) return "out_scale: guard words overwritten";
    std::string wrong = difference(case_, device_, outputs.out.view(), lse, expected, scale);
    if (!wrong.empty()) return wrong;
    for (int64_t t = data_.num_tokens; t < data_.num_tokens + case_.extra_rows; ++t) {
      for (int64_t h = 0; h < layer_.num_q_heads; ++h) {
        for (int64_t d = 0; d < layer_.value_dim(); ++d) {
          if (!std::isnan(load(outputs.out.view(), {t, h, d})))
            return fmt::format("out[{}]: a padding row was written", t);
          if (scale.rank == 3 && !std::isnan(scale_at(scale, t, h, d)))
            return fmt::format("out_scale[{}]: a padding row was written", t);
        }
        if (case_.with_lse && !std::isnan(load(lse, {h, t}))) {
          return fmt::format("lse[{}, {}]: a padding row was written", h, t);
        }
      }
    }
    return "";
  }

  // A request's bits do not depend on its neighbours. Masks that name the request's number are no such request.
  std::string compare_each_request_alone(const Outputs& together) {
    if (!case_.prefix_sharing_keeps_bits) return "";
    const std::string mask = layer_.effective_mask().text();
    for (size_t at = mask.find("request"); at != std::string::npos; at = mask.find("request", at + 1)) {
      if (at == 0 || mask[at - 1] != '[') return "";
    }
    for (size_t r = 0; r < case_.requests.size(); ++r) {
      if (case_.requests[r].q_len == 0) continue;
      if (std::string wrong = compare_alone(together, r); !wrong.empty()) return wrong;
    }
    return "";
  }

  std::string compare_alone(const Outputs& together, size_t r) {
    const auto request = static_cast<int64_t>(r);
    const int64_t first = data_.query_start_loc[r];
    const int64_t q_len = case_.requests[r].q_len;
    int64_t first_key = 0;
    int64_t first_row = 0;
    for (size_t i = 0; i < r; ++i) {
      first_key += case_.requests[i].kv_len;
      first_row += num_shown_keys(layer_, case_.requests[i]);
    }
    const std::vector<int32_t> starts = {0, static_cast<int32_t>(q_len)};
    Batch batch = data_.batch();
    batch.query_start_loc = Tensor::contiguous(starts.data(), DType::i32, {2});
    if (batch.seq_lens.is_given()) batch.seq_lens = batch.seq_lens.slice(0, request, request + 1);
    if (batch.block_table.is_given()) batch.block_table = batch.block_table.slice(0, request, request + 1);
    if (batch.alibi_slopes.is_given()) batch.alibi_slopes = batch.alibi_slopes.slice(0, request, request + 1);
    batch.slot_mapping = {};
    batch.prefix_groups.clear();
    const auto declared = operands_of(layer_.effective_mask());
    for (size_t i = 0; i < declared.size(); ++i) {
      Tensor& values = batch.mask_operands[i].values;
      const OperandScope scope = declared[i].scope;
      const int64_t begin = scope == OperandScope::request ? request : scope == OperandScope::key ? first_key : first;
      const int64_t count = scope == OperandScope::request ? 1
                            : scope == OperandScope::key   ? case_.requests[r].kv_len
                                                           : q_len;
      values = values.slice(0, begin, begin + count);
    }
    Outputs alone = make_outputs(case_, data_, q_len);
    forward(query_.view().slice(0, first, first + q_len), attention_.plan(batch), {request, first_row}, alone);
    return other_bits_alone(together, alone, request, first, q_len);
  }

  const Case& case_;
  const LayerSpec& layer_;
  const Device device_;
  CaseData data_;
  Attention attention_;
  Placed query_, key_, value_, key_pages_, value_pages_, key_scale_, value_scale_, query_scale_;
};

struct CheckOptions {
  int64_t cases = 2000;
  uint64_t seed = 1;
  int64_t first = 0;
  std::string device = "cpu";
  bool mla = false;
  int32_t ranks = 0;  // of context parallelism, as threads
  bool mpi = false;   // those that mpirun started
  bool nccl = false;  // one a GPU
  bool verbose = false;

  // What tells a failing run's command from that of plain attention.
  std::string kind() const {
    if (mpi) return " --mpi";
    if (nccl) return " --nccl";
    return fmt::format("{}{}", mla ? " --mla" : "", ranks > 0 ? fmt::format(" --ranks {}", ranks) : "");
  }
};

Device parse_device(const std::string& text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceKind::cuda, 0};
  throw CLI::ValidationError("--device", fmt::format("got {}; allowed: cpu, cuda", text));
}

// Creates each layer of the run once and makes its plans, on all cores: on a GPU, that compiles its kernels.
void create_layers(const CheckOptions& options, Device device) {
  std::vector<int64_t> firsts;  // a case of each layer
  for (int64_t i = options.first; i < options.first + options.cases; ++i) {
    const bool seen = i > options.first && layer_number(i, device.kind) == layer_number(i - 1, device.kind);
    if (!seen) firsts.push_back(i);
  }
  const int64_t end = options.first + options.cases;
  fmt::print("Compiling the kernels of {} layers.\n", firsts.size());
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::max(1U, std::thread::hardware_concurrency()); ++t) {
    threads.emplace_back([&] {
      for (size_t i = next++; i < firsts.size(); i = next++) {
        try {
          for (int64_t c = firsts[i]; c < end && layer_number(c, device.kind) == layer_number(firsts[i], device.kind);
               ++c) {
            if (options.mla) {
              prepare(draw_mla_case(options.seed, c, device.kind), device);
            } else {
              const Case random_case = draw_case(options.seed, c, device.kind);
              const CaseData data(random_case);
              Attention(random_case.layer, device).plan(data.batch());
            }
          }
        } catch (const Error&) {  // the case itself will tell
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A case's description, and what is wrong with it.
struct Checked {
  std::string description;
  std::string wrong;
};

// `where`: the device, or the ranks.
template <class AnyCase, class Where>
Checked check_case(const AnyCase& random_case, const Where& where, bool verbose) {
  std::string description = describe(random_case);
  if (verbose) fmt::print("{}\n", description);
  return {std::move(description), failure_of(random_case, where)};
}

// One rank's part, in a process of its own.
Checked check_rank(const ParallelCase& random_case, const std::shared_ptr<Collectives>& collectives, bool verbose) {
  std::string description = fmt::format("rank {} of {}", collectives->rank(), describe(random_case));
  if (verbose) fmt::print("{}\n", description);
  return {std::move(description), failure_of_rank(random_case, collectives)};
}

// Ranks of context parallelism that serve all cases of a run.
struct Ranks {
  std::shared_ptr<Collectives> of_process;            // --mpi
  std::vector<std::shared_ptr<Collectives>> threads;  // --nccl
};

Ranks make_ranks(const CheckOptions& options) {
  Ranks ranks;
  if (options.mpi) ranks.of_process = mpi_ranks();
  if (options.nccl) ranks.threads = nccl_ranks_of_all_devices();
  return ranks;
}

Checked check_case_number(int64_t index, const CheckOptions& options, Device device, const Ranks& ranks) {
  const uint64_t seed = options.seed;
  if (options.mla) {
    return check_case(draw_mla_case(seed, index, device.kind, options.ranks), device, options.verbose);
  }
  if (options.mpi) {
    return check_rank(draw_parallel_case(seed, index, ranks.of_process->num_ranks(), device.kind), ranks.of_process,
                      options.verbose);
  }
  if (options.nccl) {
    const auto num_ranks = static_cast<int32_t>(ranks.threads.size());
    return check_case(draw_parallel_case(seed, index, num_ranks, device.kind), ranks.threads, options.verbose);
  }
  if (options.ranks > 0) {
    return check_case(draw_parallel_case(seed, index, options.ranks, device.kind), device, options.verbose);
  }
  return check_case(draw_case(seed, index, device.kind), device, options.verbose);
}

void run_check(const CheckOptions& options) {
  const Device device = parse_device(options.nccl ? "cuda" : options.device);
  if (device.kind == DeviceKind::cuda && num_cuda_devices() == 0) {
    throw Error(ErrorCode::unavailable, "--device", "cuda, and no GPU was found", "cpu");
  }
  const Ranks ranks = make_ranks(options);
  const bool is_speaker = !ranks.of_process || ranks.of_process->rank() == 0;
  const std::string engine = device.kind == DeviceKind::cpu
                                 ? fmt::format("cpu, {} on {} threads", instruction_set_in_use(), num_threads())
                                 : "cuda:0";
  if (is_speaker) {
    fmt::print("Checking {} random cases (seed {}) on {}, against the float64 oracle.\n", options.cases, options.seed,
               engine);
  }
  const bool has_plain_layers = !options.mpi && !options.nccl && options.ranks == 0;
  if (device.kind == DeviceKind::cuda && options.cases > 0 && has_plain_layers) create_layers(options, device);
  Progress progress(is_speaker ? options.cases : 0);
  int64_t failed = 0;
  for (int64_t i = 0; i < options.cases; ++i) {
    const int64_t index = options.first + i;
    if (options.verbose) fmt::print("{}: ", index);
    const Checked checked = check_case_number(index, options, device, ranks);
    if (!checked.wrong.empty()) {
      ++failed;
      progress.clear();
      fmt::print("FAILED {}\n  {}\n  reproduce: qkv check{} --device {} --seed {} --first {} --cases 1 --verbose\n",
                 checked.wrong, checked.description, options.kind(), options.device, options.seed, index);
    }
    if (is_speaker && progress.is_due(i + 1))
      progress.show(i + 1, fmt::format("{}/{} cases, {} failed", i + 1, options.cases, failed));
  }
  progress.clear();
  if (is_speaker) fmt::print("{} passed, {} failed\n", options.cases - failed, failed);
  if (failed != 0) throw CLI::RuntimeError(1);
}

}  // namespace

std::string other_bits_alone(const Outputs& together, const Outputs& alone, int64_t request, int64_t first,
                             int64_t num_rows) {
  const auto differs = [&](const char* name) {
    return fmt::format("request {} alone has other bits of {} than in the batch", request, name);
  };
  const Tensor out = together.out.view(), lse = together.lse.view();
  const int64_t num_heads = out.shape[1], dim = out.shape[2];
  const auto row_bytes = static_cast<size_t>(num_heads * dim * size_bytes(out.dtype));
  const auto* all = static_cast<const std::byte*>(together.out.buffer().data());
  if (std::memcmp(all + static_cast<size_t>(first) * row_bytes, alone.out.buffer().data(),
                  static_cast<size_t>(num_rows) * row_bytes) != 0) {
    return differs("out");
  }
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t h = 0; h < num_heads; ++h) {
      for (int64_t d = 0; d < dim; ++d) {
        const double scale = scale_at(together.scale.view(), first + t, h, d);
        if (scale != scale_at(alone.scale.view(), t, h, d)) return differs("out_scale");
      }
      if (!lse.is_given()) continue;
      const float of_batch = load(lse, {h, first + t}), of_alone = load(alone.lse.view(), {h, t});
      if (std::memcmp(&of_batch, &of_alone, sizeof(float)) != 0) return differs("lse");
    }
  }
  return "";
}

void write_row(const CaseData& data, const LayerSpec& layer, const Tensor& source, int64_t token, int64_t slot,
               int64_t head, const Tensor& pages, OwnedTensor& scales) {
  const int64_t page = slot / layer.cache->page_size, offset = slot % layer.cache->page_size;
  const int64_t dim = pages.shape[3];
  if (layer.kv_scales == KvScales::per_token_head) {
    float largest = 0;
    for (int64_t d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(load(source, {token, head, d})));
    store(scales.view(), {page, offset, head}, largest / static_cast<float>(stored_range(layer.kv_dtype).largest));
  }
  const float scale = data.scale_of(scales, data.slot_requests[token], head, {page, offset, head});
  for (int64_t d = 0; d < dim; ++d) store(pages, {page, offset, head, d}, load(source, {token, head, d}) / scale);
}

std::string failure_of(const Case& random_case, Device device) {
  try {
    return CaseRun(random_case, device).run();
  } catch (const Error& error) {
    return fmt::format("refused: {}", error.what());
  }
}

void add_check_command(CLI::App& app) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand("check", "Compare random cases over all features with the float64 oracle");
  command->add_option("--cases", options->cases, "How many cases to draw")
      ->capture_default_str()
      ->check(whole_number(0, kAnyNumber));
  command->add_option("--seed", options->seed, "Cases are a function of seed and number")
      ->capture_default_str()
      ->check(whole_number(0, kAnyNumber));
  command->add_option("--first", options->first, "Number of the first case")
      ->capture_default_str()
      ->check(whole_number(0, kAnyNumber));
  command->add_option("--device", options->device, "Engine under test: cpu or cuda")->capture_default_str();
  CLI::Option* mla =
      command->add_flag("--mla", options->mla, "MLA prefill: chunks of latent context against unchunked attention");
  CLI::Option* ranks =
      command
          ->add_option("--ranks", options->ranks, "Context parallelism over so many ranks, as threads of this process")
          ->check(whole_number(1, 64));
  CLI::Option* mpi = command->add_flag("--mpi", options->mpi, "The same over the processes that mpirun started")
                         ->excludes(mla)
                         ->excludes(ranks);
  command->add_flag("--nccl", options->nccl, "The same with a rank on each GPU")
      ->excludes(mla)
      ->excludes(ranks)
      ->excludes(mpi);
  command->add_flag("--verbose", options->verbose, "Print each case before it runs");
  command->footer(
      "Each case draws a layer, a cache layout, a mask and a batch; fills all memory that no request owns with NaN;\n"
      "runs update_cache and forward; compares out and lse with the oracle, the cache byte for byte, the guard words\n"
      "round outputs, and each request alone bit for bit. A failing case prints the command that repeats it.\n\n"
      "Examples: qkv check --cases 20000 --seed 7\n"
      "          qkv check --ranks 4\n"
      "          qkv check --mla --ranks 4\n"
      "          mpirun -n 4 qkv check --mpi --cases 200");
  command->callback([options] { run_check(*options); });
}

}  // namespace qkv::tools
