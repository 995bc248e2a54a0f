#include "spec/rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/eight_bit.hpp"
#include "core/shard_rules.hpp"

namespace qkv::spec {
namespace {

constexpr int32_t kMinHeadDim = 8;
constexpr int32_t kMaxHeadDim = 512;
constexpr int32_t kMaxHeads = 1 << 16;
constexpr float kMaxQueryFactor = 1e28F;  // times a query's number, it is finite
constexpr float kMaxSlope = 1e28F;        // times any distance, it is finite
constexpr size_t kMaxCudaOperands = 8;    // kMaxMaskOperands of the kernels

class Rules {
 public:
  Rules(const LayerSpec& spec, Device device) : spec_(spec), device_(device) {}

  std::vector<Error> run() {
    check_device();
    check_heads();
    check_head_dims();
    check_dtypes();
    check_kv_scales();
    check_cache();
    check_shown_keys();
    check_score_terms();
    return std::move(reasons_);
  }

 private:
  template <class Value>
  void against(std::string argument, const Value& value, std::string allowed,
               ErrorCode code = ErrorCode::invalid_argument) {
    reasons_.emplace_back(code, std::move(argument), fmt::format("{}", value), std::move(allowed));
  }

  void check_device() {
    if (device_.index < 0 || (device_.kind == DeviceKind::cpu && device_.index != 0)) {
      against("device",
              fmt::format("{} with index {}", device_.kind == DeviceKind::cpu ? "cpu" : "cuda", device_.index),
              "cpu with index 0, or cuda with an index >= 0");
    }
    if (device_.kind == DeviceKind::cuda) check_cuda();
  }

  // What the GPU engine cannot do of what the CPU engine can.
  void check_cuda() {
    const bool fp8_query = spec_.query_dtype == DType::f8e4m3 && spec_.kv_dtype == DType::f8e4m3;
    if (spec_.query_dtype != DType::bf16 && spec_.query_dtype != DType::f16 && !fp8_query) {
      against("query_dtype", to_string(spec_.query_dtype),
              "bf16, f16 or, with keys and values of f8e4m3, f8e4m3 on a GPU", ErrorCode::unsupported);
    }
    const bool cache_8bit = is_8bit(spec_.kv_dtype);
    if (spec_.kv_dtype != spec_.query_dtype && !cache_8bit) {
      against("kv_dtype", to_string(spec_.kv_dtype),
              fmt::format("query_dtype = {}, f8e4m3, f8e5m2 or i8 on a GPU", to_string(spec_.query_dtype)),
              ErrorCode::unsupported);
    }
    // Rows begin at multiples of 16 bytes.
    const auto check_dim = [&](const char* name, int32_t dim, bool rows_8bit) {
      const int32_t multiple = rows_8bit ? 16 : 8;
      if (dim % multiple == 0) return;
      against(name, dim, fmt::format("a multiple of {}{} on a GPU", multiple, rows_8bit ? " with 8-bit elements" : ""),
              ErrorCode::unsupported);
    };
    check_dim("head_dim", spec_.head_dim, cache_8bit);
    check_dim("head_dim_v", spec_.value_dim(), cache_8bit || is_float8(spec_.out_dtype()));
    // The sm80 kernel computes wider rows in two passes of half the columns, which must not cut a group.
    const bool cuts_groups = spec_.value_dim() > 256 && spec_.value_dim() != 512;
    if (spec_.output_scales == OutputScales::per_token_group && cuts_groups) {
      against("head_dim_v", spec_.value_dim(), "up to 256, or 512, with output_scales per_token_group on a GPU",
              ErrorCode::unsupported);
    }
    const size_t num_operands = operands_of(spec_.effective_mask()).size();
    if (num_operands > kMaxCudaOperands) {
      against("mask", fmt::format("{} operands", num_operands),
              fmt::format("at most {} operands on a GPU", kMaxCudaOperands), ErrorCode::unsupported);
    }
  }

  void check_heads() {
    if (spec_.num_q_heads < 1 || spec_.num_q_heads > kMaxHeads) {
      against("num_q_heads", spec_.num_q_heads, fmt::format("1 to {}", kMaxHeads));
    }
    if (spec_.num_kv_heads < 1) {
      against("num_kv_heads", spec_.num_kv_heads, "at least 1");
    } else if (spec_.num_q_heads % spec_.num_kv_heads != 0) {
      against("num_kv_heads", spec_.num_kv_heads, fmt::format("a divisor of num_q_heads = {}", spec_.num_q_heads));
    }
  }

  void check_head_dims() {
    const auto check = [&](const char* name, int32_t dim) {
      if (dim < kMinHeadDim || dim > kMaxHeadDim) against(name, dim, fmt::format("{} to {}", kMinHeadDim, kMaxHeadDim));
    };
    check("head_dim", spec_.head_dim);
    if (spec_.head_dim_v != 0) check("head_dim_v", spec_.head_dim_v);
  }

  void check_dtypes() {
    const auto check = [&](const char* name, DType dtype, bool allows_8bit, const char* allowed) {
      if (dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16) return;
      if (is_8bit(dtype) && allows_8bit) return;
      against(name, to_string(dtype), allowed, is_8bit(dtype) ? ErrorCode::unsupported : ErrorCode::invalid_argument);
    };
    constexpr const char* kFloats = "f32, f16, bf16, f8e4m3 or f8e5m2: only keys and values are of i8";
    check("query_dtype", spec_.query_dtype, spec_.query_dtype != DType::i8, kFloats);
    check("kv_dtype", spec_.kv_dtype, true, "f32, f16, bf16, f8e4m3, f8e5m2 or i8");
    if (spec_.output_dtype) check("output_dtype", *spec_.output_dtype, *spec_.output_dtype != DType::i8, kFloats);
    if (spec_.output_scales != OutputScales::per_tensor && !is_float8(spec_.out_dtype())) {
      against("output_scales", to_string(spec_.output_scales),
              fmt::format("per_tensor with outputs of {}: only 8-bit floats are scaled", to_string(spec_.out_dtype())));
    }
  }

  void check_kv_scales() {
    const bool has_scales = spec_.kv_scales != KvScales::none;
    if (has_scales == is_8bit(spec_.kv_dtype)) return;
    against("kv_scales", to_string(spec_.kv_scales),
            fmt::format("{} with kv_dtype {}",
                        has_scales ? "none" : "per_tensor, per_head, per_request_head or per_token_head",
                        to_string(spec_.kv_dtype)));
  }

  void check_cache() {
    if (!spec_.cache) return;
    if (spec_.cache->page_size < 1) against("cache.page_size", spec_.cache->page_size, "at least 1 token");
    if (spec_.type == AttentionType::encoder || spec_.type == AttentionType::encoder_only) {
      against("cache", fmt::format("pages of {} tokens", spec_.cache->page_size),
              fmt::format("no cache for type {}: its keys are the new tokens themselves", to_string(spec_.type)));
    }
  }

  void check_shown_keys() {
    const Shard& shard = spec_.shard;
    if (spec_.key_run != KeyRun::all && spec_.type != AttentionType::decoder) {
      against("key_run", to_string(spec_.key_run),
              fmt::format("all with type {}: only a decoder's keys end with its new tokens", to_string(spec_.type)));
    }
    if (spec_.key_run == KeyRun::new_tokens && spec_.cache) {
      against("cache", fmt::format("pages of {} tokens", spec_.cache->page_size),
              "no cache with key_run new_tokens: the new tokens' keys and values are dense tensors");
    }
    if (spec_.key_run == KeyRun::new_tokens && shard.num_ranks > 1) {
      against("shard.num_ranks", shard.num_ranks, "1 with key_run new_tokens: every rank has the new tokens");
    }
    const std::vector<Error> of_shard = reasons_against(shard);
    reasons_.insert(reasons_.end(), of_shard.begin(), of_shard.end());
    const bool has_interleave = std::none_of(of_shard.begin(), of_shard.end(), [](const Error& reason) {
      return reason.argument() == "shard.interleave_size";
    });
    const bool has_pages = spec_.cache && spec_.cache->page_size >= 1;
    if (has_interleave && has_pages && spec_.cache->page_size % shard.interleave_size != 0) {
      against("shard.interleave_size", shard.interleave_size,
              fmt::format("a divisor of cache.page_size = {}", spec_.cache->page_size));
    }
  }

  void check_score_terms() {
    if (spec_.scale && !std::isfinite(*spec_.scale)) against("scale", *spec_.scale, "a finite number");
    if (!std::isfinite(spec_.softcap) || spec_.softcap < 0) {
      against("softcap", spec_.softcap, "0 (off) or a finite number above 0");
    } else if (spec_.softcap > 0 && std::fabs(spec_.effective_scale() / spec_.softcap) > kMaxQueryFactor) {
      against("softcap", spec_.softcap, "0 (off) or a number to which scale is at most 1e28 times as large");
    }
    check_per_head(
        "alibi_slopes", spec_.alibi_slopes, [](float slope) { return std::fabs(slope) <= kMaxSlope; },
        "from -1e28 to 1e28");
    if (spec_.alibi_per_request && !spec_.alibi_slopes.empty()) {
      against("alibi_slopes", fmt::format("{} values", spec_.alibi_slopes.size()),
              "none with alibi_per_request: slopes come with each batch");
    }
    check_per_head(
        "sinks", spec_.sinks, [](float sink) { return !std::isnan(sink) && sink < INFINITY; },
        "a number below inf (-inf = no sink)");
  }

  template <class IsAllowed>
  void check_per_head(const char* name, const std::vector<float>& values, IsAllowed is_allowed, const char* allowed) {
    if (values.empty()) return;
    if (static_cast<int64_t>(values.size()) != spec_.num_q_heads) {
      against(name, fmt::format("{} values", values.size()), fmt::format("one a query head: {}", spec_.num_q_heads));
    }
    for (size_t head = 0; head < values.size(); ++head) {
      if (!is_allowed(values[head])) {
        against(fmt::format("{}[{}]", name, head), values[head], allowed);
        return;
      }
    }
  }

  const LayerSpec& spec_;
  Device device_;
  std::vector<Error> reasons_;
};

}  // namespace

std::vector<Error> reasons_against(const LayerSpec& spec, Device device) { return Rules(spec, device).run(); }

}  // namespace qkv::spec
