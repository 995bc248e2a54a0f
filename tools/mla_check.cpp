// Runs a case of MLA prefill and compares it with unchunked attention.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "case_data.hpp"
#include "check.hpp"
#include "mla_cases.hpp"
#include "parallel_cases.hpp"
#include "qkv/reference.hpp"
#include "qkv/status.hpp"

namespace qkv::tools {
namespace {

// Latents and matrix are whole numbers of steps. Products of a latent, also one that was cached in 8 bits, and a column
// of the matrix are then multiples of 2^-18, their sums less than 2^6: exact in f32, in any order. With other numbers,
// a sum between two neighbours of a 16-bit dtype may be rounded to the one by the definition and to the other by the
// engine, and what that moves in a result of few keys is a step of its largest value.
constexpr float kLatentStep = 0x1p-4, kMatrixStep = 0x1p-8, kLatentScale = 5 * 0x1p-8;

void fill_normal(Draw& draw, float magnitude, float step, const Tensor& rows) {
  for (int64_t r = 0; r < rows.shape[0]; ++r) {
    for (int64_t c = 0; c < rows.shape[1]; ++c)
      store(rows, {r, c}, std::round(magnitude * draw.normal() / step) * step);
  }
}

std::vector<double> values_of(const Tensor& rows, int64_t num_columns) {
  std::vector<double> values;
  for (int64_t r = 0; r < rows.shape[0]; ++r) {
    for (int64_t c = 0; c < num_columns; ++c) values.push_back(load(rows, {r, c}));
  }
  return values;
}

class MlaRun {
 public:
  // ranks: this one's end of them, if there are any. expected: of all heads.
  MlaRun(const MlaCase& c, Device device, const std::shared_ptr<Collectives>& ranks, SharedResult& expected)
      : case_(c),
        expected_(expected),
        spec_(c.spec()),
        device_(device),
        ranks_(ranks),
        shard_{ranks ? ranks->rank() : 0, c.options.num_ranks, c.options.interleave_size},
        data_(c.attention),
        matrix_(spec_.dtype, {spec_.num_heads * (spec_.qk_nope_head_dim + spec_.v_head_dim), spec_.kv_lora_rank}),
        latents_(spec_.dtype, {data_.num_keys, spec_.latent_dim()}),
        new_latents_(spec_.dtype, {data_.num_tokens + c.attention.extra_rows, spec_.latent_dim()}),
        latent_scale_(DType::f32, {1}),
        num_heads_(spec_.num_heads) {
    if (c.exchange) {
      sharing_states_.emplace(MlaContextParallelSpec{spec_, c.options.interleave_size, *c.exchange}, ranks);
      num_heads_ = sharing_states_->num_heads();
      first_head_ = num_heads_ == spec_.num_heads ? 0 : shard_.rank * num_heads_;
    } else {
      prefill_.emplace(spec_, device);
    }
    Draw draw(c.attention.seed ^ 0x1A7E17ULL, c.attention.index);
    fill_normal(draw, 1, kLatentStep, latents_.view());
    fill_normal(draw, 1.0F / std::sqrt(static_cast<float>(spec_.kv_lora_rank)), kMatrixStep, matrix_.view());
    store(latent_scale_.view(), {0}, kLatentScale);
    round_context();
    make_cache(draw);
    make_new_latents();
  }

  std::string run() {
    Outputs together = forward(query(), data_.batch(), block_table(), new_latents_, data_.num_tokens);
    const reference::Result& expected = expected_.get([&] {
      make_keys();
      return reference::attention(case_.attention.layer, data_.batch(), data_.query.view(), data_.key.view(),
                                  data_.value.view());
    });
    if (std::string wrong = compare(together, expected); !wrong.empty()) return wrong;
    return case_.options.batch_invariant ? compare_each_request_alone(together) : "";
  }

 private:
  // Keys and values of all tokens, by the definition.
  void make_keys() {
    const int64_t nope = spec_.qk_nope_head_dim;
    const int64_t rows_of_head = nope + spec_.v_head_dim;
    const int64_t rank = spec_.kv_lora_rank;
    const std::vector<double> latents = values_of(latents_.view(), rank);
    const std::vector<double> matrix = values_of(matrix_.view(), rank);
    const auto product = [&](int64_t token, int64_t row) {
      return static_cast<float>(
          std::inner_product(&latents[token * rank], &latents[token * rank] + rank, &matrix[row * rank], 0.0));
    };
    for (int64_t t = 0; t < data_.num_keys; ++t) {
      for (int64_t h = 0; h < spec_.num_heads; ++h) {
        for (int64_t d = 0; d < nope; ++d) store(data_.key.view(), {t, h, d}, product(t, h * rows_of_head + d));
        for (int64_t d = 0; d < spec_.qk_rope_head_dim; ++d) {
          store(data_.key.view(), {t, h, nope + d}, load(latents_.view(), {t, spec_.kv_lora_rank + d}));
        }
        for (int64_t d = 0; d < spec_.v_head_dim; ++d) {
          store(data_.value.view(), {t, h, d}, product(t, h * rows_of_head + nope + d));
        }
      }
    }
  }

  // Of 8-bit pages, the context's latents are what can be read there.
  void round_context() {
    if (!spec_.cache_dtype) return;
    const OwnedTensor element(*spec_.cache_dtype, {1});
    int64_t first_key = 0;
    for (const RequestLengths& r : case_.attention.requests) {
      for (int64_t key = first_key; key < first_key + r.kv_len - r.q_len; ++key) {
        for (int64_t d = 0; d < spec_.latent_dim(); ++d) {
          store(element.view(), {0}, load(latents_.view(), {key, d}) / kLatentScale);
          store(latents_.view(), {key, d}, load(element.view(), {0}) * kLatentScale);
        }
      }
      first_key += r.kv_len;
    }
  }

  // The context's rows that this rank keeps in their pages, in random order. All else is NaN, and table entries behind
  // the context junk.
  void make_cache(Draw& draw) {
    const int64_t page_size = case_.options.page_size;
    int64_t num_pages = 1;
    for (const RequestLengths& r : case_.attention.requests) {
      const int64_t pages = (shard_.local_length(r.kv_len - r.q_len) + page_size - 1) / page_size;
      table_width_ = std::max(table_width_, pages + 1);
      num_pages += pages;
    }
    const float scale = spec_.cache_dtype ? kLatentScale : 1.0F;
    pages_ = OwnedTensor(spec_.latent_dtype(), {num_pages, page_size, spec_.latent_dim()});
    std::vector<int32_t> free_pages;
    for (int64_t p = 0; p < num_pages; ++p) free_pages.push_back(static_cast<int32_t>(p));
    for (size_t i = free_pages.size(); i > 1; --i) std::swap(free_pages[i - 1], free_pages[draw.range(0, i - 1)]);
    int64_t first_key = 0;
    for (const RequestLengths& r : case_.attention.requests) {
      std::vector<int32_t> row(table_width_, std::numeric_limits<int32_t>::max());
      for (int32_t t = 0; t < shard_.local_length(r.kv_len - r.q_len); ++t) {
        if (t % page_size == 0) {
          row[t / page_size] = free_pages.back();
          free_pages.pop_back();
        }
        for (int64_t d = 0; d < spec_.latent_dim(); ++d) {
          store(pages_.view(), {row[t / page_size], t % page_size, d},
                load(latents_.view(), {first_key + shard_.position(t), d}) / scale);
        }
      }
      table_.insert(table_.end(), row.begin(), row.end());
      first_key += r.kv_len;
    }
  }

  void make_new_latents() {
    int64_t first_key = 0;
    for (size_t r = 0; r < case_.attention.requests.size(); ++r) {
      const RequestLengths& lengths = case_.attention.requests[r];
      for (int64_t t = 0; t < lengths.q_len; ++t) {
        for (int64_t d = 0; d < spec_.latent_dim(); ++d) {
          store(new_latents_.view(), {data_.query_start_loc[r] + t, d},
                load(latents_.view(), {first_key + lengths.kv_len - lengths.q_len + t, d}));
        }
      }
      first_key += lengths.kv_len;
    }
  }

  Tensor query() { return data_.query.view().slice(1, first_head_, first_head_ + num_heads_); }
  Tensor block_table() const {
    return Tensor::contiguous(table_.data(), DType::i32,
                              {static_cast<int64_t>(case_.attention.requests.size()), table_width_});
  }

  // first_token: of the batch's query and new latents in the case's.
  Outputs forward(const Tensor& query, Batch batch, const Tensor& block_table, OwnedTensor& new_latents,
                  int64_t num_tokens, int64_t first_token = 0) {
    batch.block_table = block_table;
    ContextChunkOptions options = case_.options;
    options.rank = shard_.rank;
    const MlaPlan plan = sharing_states_ ? sharing_states_->plan(batch, options) : prefill_->plan(batch, options);
    const int64_t rows = num_tokens + case_.attention.extra_rows;
    Outputs outputs;
    outputs.out = OwnedTensor(spec_.out_dtype(), {rows, num_heads_, spec_.v_head_dim});
    if (case_.attention.with_lse) outputs.lse = OwnedTensor(DType::f32, {num_heads_, rows});
    outputs.scale = data_.output_scale(rows, num_heads_);
    OwnedTensor workspace_memory(DType::f32, {plan.workspace_bytes() / 4});
    const Placed query_tensor(data_.query, device_), latents(new_latents, device_), pages(pages_, device_),
        matrix(matrix_, device_), workspace(workspace_memory, device_), out(outputs.out, device_),
        lse(outputs.lse, device_), scale(outputs.scale, device_), latent_scale(latent_scale_, device_);
    const auto from_first = [&](const Tensor& tensor) { return tensor.slice(0, first_token, tensor.shape[0]); };
    const Tensor queries = from_first(query_tensor.on_device(query)), new_rows = from_first(latents.view());
    const Tensor scale_of_latents = spec_.cache_dtype ? latent_scale.view() : Tensor();
    const Projection projection = matrix_projection(spec_, matrix.view());
    if (sharing_states_) {
      sharing_states_->forward(queries, new_rows, pages.view(), plan, projection, workspace.view(), out.view(),
                               lse.view(), {}, {}, scale.view(), scale_of_latents);
    } else if (ranks_) {
      prefill_->forward(queries, new_rows, pages.view(), plan, projection, workspace.view(), *ranks_, out.view(),
                        lse.view(), {}, {}, scale.view(), scale_of_latents);
    } else {
      prefill_->forward(queries, new_rows, pages.view(), plan, projection, workspace.view(), out.view(), lse.view(), {},
                        {}, scale.view(), scale_of_latents);
    }
    out.fetch();
    scale.fetch();
    if (case_.attention.with_lse) lse.fetch();
    workspace.fetch();
    if (!workspace_memory.buffer().guards_intact()) throw Error(ErrorCode::internal, "workspace", "overrun", "none");
    return outputs;
  }

  bool agree(double got, double want, double absolute, double relative) const {
    if (std::isinf(want) || std::isinf(got)) return got == want;
    return std::fabs(got - want) <= absolute + relative * std::fabs(want);  // false for NaN
  }

  // A state of the new tokens is rounded to the output's dtype once more than plain attention's result: two roundings;
  // not where outputs are of 8 bits, whose states are f32. On a GPU, a tensor core's sums of projected elements may
  // lose bits, so that an element rounds to its dtype's other neighbour than the definition's.
  std::string compare(const Outputs& outputs, const reference::Result& expected) const {
    const bool on_gpu = device_.kind == DeviceKind::cuda;
    const bool half = spec_.dtype != DType::f32;
    const double of_weights = !on_gpu ? 0 : spec_.dtype == DType::bf16 ? 1e-2 : 2e-3;
    const DType dtype = spec_.out_dtype();
    const double rounding = rounding_of(dtype);
    const StoredRange range = stored_range(dtype);
    // Exchanged states travel in the queries' dtype, and values are of size 1.
    constexpr double kLargestValue = 5;
    const double of_exchange = case_.exchange && half ? kLargestValue * rounding_of(spec_.dtype) : 0;
    const double of_states = of_weights + of_exchange + (on_gpu && half ? 4e-4 : 5e-5) * case_.attention.magnitude;
    const double absolute = of_states + (is_float8(dtype) ? 0 : rounding);
    const Tensor out_scale = outputs.scale.view();
    if (!outputs.out.buffer().guards_intact()) return "out: guard words overwritten";
    for (int64_t t = 0; t < data_.num_tokens + case_.attention.extra_rows; ++t) {
      for (int64_t h = 0; h < num_heads_; ++h) {
        for (int64_t d = 0; d < spec_.v_head_dim; ++d) {
          const double scale = scale_at(out_scale, t, h, d);
          const double got = load(outputs.out.view(), {t, h, d}) * scale;
          if (t >= data_.num_tokens) {
            if (!std::isnan(got)) return fmt::format("out[{}]: a padding row was written", t);
            continue;
          }
          const double* row = &expected.out[(t * spec_.num_heads + first_head_ + h) * spec_.v_head_dim];
          if (out_scale.rank == 3 && d % kScaleGroup == 0) {
            const int64_t end = std::min<int64_t>(d + kScaleGroup, spec_.v_head_dim);
            const std::string wrong = wrong_scale(scale, dtype, row, d, end, of_states, of_weights / 2 + 1e-5);
            if (!wrong.empty()) return fmt::format("out[{}, {}]: {}", t, h, wrong);
          }
          const double limit = range.largest * scale;
          const double want = std::isnan(row[d]) ? row[d] : std::clamp(row[d], -limit, limit);
          if (!agree(got, want, absolute + range.half_smallest * scale, 2 * rounding + of_weights / 2)) {
            return fmt::format("out[{}, {}, {}]: got {}, expected {}", t, h, d, got, want);
          }
        }
      }
    }
    return case_.attention.with_lse ? compare_lse(outputs, expected) : "";
  }

  std::string compare_lse(const Outputs& outputs, const reference::Result& expected) const {
    if (!outputs.lse.buffer().guards_intact()) return "lse: guard words overwritten";
    const double absolute =
        (device_.kind == DeviceKind::cuda || (case_.exchange && spec_.dtype != DType::f32) ? 2e-3 : 1e-4) *
        case_.attention.magnitude;
    for (int64_t h = 0; h < num_heads_; ++h) {
      for (int64_t t = 0; t < data_.num_tokens; ++t) {
        const double got = load(outputs.lse.view(), {h, t});
        const double want = expected.lse[(first_head_ + h) * data_.num_tokens + t];
        if (!agree(got, want, absolute, 1e-5)) {
          return fmt::format("lse[{}, {}]: got {}, expected {}", h, t, got, want);
        }
      }
    }
    return "";
  }

  bool mask_names_the_request() const {
    const std::string mask = case_.attention.layer.effective_mask().text();
    for (size_t at = mask.find("request"); at != std::string::npos; at = mask.find("request", at + 1)) {
      if (at == 0 || mask[at - 1] != '[') return true;
    }
    return false;
  }

  std::string compare_each_request_alone(const Outputs& together) {
    if (mask_names_the_request()) return "";
    int64_t first_key = 0;
    for (size_t r = 0; r < case_.attention.requests.size(); ++r) {
      if (case_.attention.requests[r].q_len > 0) {
        if (std::string wrong = compare_alone(together, static_cast<int64_t>(r), first_key); !wrong.empty()) {
          return wrong;
        }
      }
      first_key += case_.attention.requests[r].kv_len;
    }
    return "";
  }

  std::string compare_alone(const Outputs& together, int64_t request, int64_t first_key) {
    const RequestLengths& lengths = case_.attention.requests[request];
    const int64_t first = data_.query_start_loc[request];
    const std::vector<int32_t> starts = {0, lengths.q_len};
    Batch batch = data_.batch();
    batch.query_start_loc = Tensor::of(starts, {2});
    batch.seq_lens = batch.seq_lens.slice(0, request, request + 1);
    for (MaskOperand& operand : batch.mask_operands) {
      const auto declared = operands_of(case_.attention.layer.effective_mask());
      const auto found =
          std::find_if(declared.begin(), declared.end(), [&](const auto& d) { return d.name == operand.name; });
      const bool of_request = found->scope == OperandScope::request;
      const bool of_key = found->scope == OperandScope::key;
      const int64_t begin = of_request ? request : of_key ? first_key : first;
      const int64_t count = of_request ? 1 : of_key ? lengths.kv_len : lengths.q_len;
      operand.values = operand.values.slice(0, begin, begin + count);
    }
    Outputs alone =
        forward(query(), batch, block_table().slice(0, request, request + 1), new_latents_, lengths.q_len, first);
    return other_bits_alone(together, alone, request, first, lengths.q_len);
  }

  const MlaCase& case_;
  SharedResult& expected_;
  const MlaSpec spec_;
  const Device device_;
  const std::shared_ptr<Collectives> ranks_;
  const Shard shard_;
  CaseData data_;
  OwnedTensor matrix_, latents_, new_latents_, latent_scale_, pages_;
  std::vector<int32_t> table_;
  int64_t table_width_ = 1;
  // Whoever runs the case, and the heads that it has of all.
  std::optional<MlaPrefill> prefill_;
  std::optional<MlaContextParallel> sharing_states_;
  int64_t first_head_ = 0, num_heads_;
};

std::string failure_of_run(const MlaCase& c, Device device, const std::shared_ptr<Collectives>& ranks,
                           SharedResult& expected) {
  try {
    return MlaRun(c, device, ranks, expected).run();
  } catch (const Error& error) {
    return fmt::format("refused: {}", error.what());
  }
}

}  // namespace

void prepare(const MlaCase& c, Device device) {
  const CaseData data(c.attention);
  MlaPrefill(c.spec(), device).plan(data.batch(), c.options);
}

std::string failure_of(const MlaCase& c, Device device) {
  SharedResult expected;
  if (!c.with_ranks) return failure_of_run(c, device, nullptr, expected);
  return first_failure(c.options.num_ranks, device, [&](const std::shared_ptr<Collectives>& rank) {
    return failure_of_run(c, device, rank, expected);
  });
}

}  // namespace qkv::tools
