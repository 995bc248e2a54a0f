#include "case_data.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace qkv::tools {
namespace {

constexpr std::byte kGuard{0xA5};

// What no request owns. In every float format these bytes repeat to a NaN: f32 0xFFFFFFFF, 16-bit 0xFFFF, 8-bit 0xFF.
// An i8 has none, and is the number furthest from all others; scales of such tokens are NaN all the same.
constexpr std::byte poison(DType dtype) { return dtype == DType::i8 ? std::byte{0x80} : std::byte{0xFF}; }

// i8, to nearest even; NaN is 0.
int8_t to_int8(float value) {
  return std::isnan(value) ? int8_t{0} : static_cast<int8_t>(std::clamp(std::nearbyint(value), -128.0F, 127.0F));
}

// A float format of 8 or 16 bits: conversions by arithmetic on doubles, apart from the library's own, which are under
// test.
struct Format {
  int32_t mantissa_bits;
  int32_t min_exponent;
  uint16_t sign;
  uint16_t overflow;  // what is too large becomes this: infinity, or the largest number
  uint16_t infinity;  // where there is none, the NaN
  uint16_t nan;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {7, -126, 0x8000, 0x7F80, 0x7F80, 0x7FC0};
    case DType::f8e4m3:
      return {3, -6, 0x80, 0x7E, 0x7F, 0x7F};
    case DType::f8e5m2:
      return {2, -14, 0x80, 0x7B, 0x7C, 0x7F};
    default:
      return {10, -14, 0x8000, 0x7C00, 0x7C00, 0x7E00};
  }
}

uint16_t to_bits(float value, const Format& format) {
  const uint16_t sign = std::signbit(value) ? format.sign : 0;
  if (std::isnan(value)) return format.nan;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | format.overflow;
  const int32_t exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  // A biased exponent of 1 stands for min_exponent; subnormals lack the leading bit and so land on 0 by themselves.
  const double bits =
      steps + static_cast<double>(exponent - format.min_exponent) * std::ldexp(1.0, format.mantissa_bits);
  return sign | static_cast<uint16_t>(std::min(bits, static_cast<double>(format.overflow)));
}

float from_bits(uint16_t bits, const Format& format) {
  const int32_t magnitude = bits & (format.sign - 1);
  double value = 0;
  if (magnitude > format.infinity || magnitude == format.nan) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (magnitude == format.infinity) {
    value = std::numeric_limits<double>::infinity();
  } else {
    const int32_t biased = magnitude >> format.mantissa_bits;
    const int32_t mantissa = magnitude & ((1 << format.mantissa_bits) - 1);
    const int32_t leading = biased == 0 ? 0 : 1 << format.mantissa_bits;
    value = std::ldexp(leading + mantissa, format.min_exponent + std::max(biased, 1) - 1 - format.mantissa_bits);
  }
  return static_cast<float>((bits & format.sign) != 0 ? -value : value);
}

int64_t offset_of(const Tensor& tensor, std::initializer_list<int64_t> index) {
  int64_t offset = 0;
  int32_t axis = 0;
  for (const int64_t i : index) offset += i * tensor.stride[axis++];
  return offset;
}

template <class Int>
Tensor view_of(const std::vector<Int>& values) {
  const DType dtype = sizeof(Int) == 8 ? DType::i64 : DType::i32;
  return Tensor::contiguous(values.data(), dtype, {static_cast<int64_t>(values.size())});
}

}  // namespace

GuardedBuffer::GuardedBuffer(int64_t num_elements, DType dtype)
    : bytes_(2 * kGuardBytes + static_cast<size_t>(num_elements * size_bytes(dtype)), poison(dtype)) {
  std::fill_n(bytes_.begin(), kGuardBytes, kGuard);
  std::fill_n(bytes_.end() - kGuardBytes, kGuardBytes, kGuard);
}

bool GuardedBuffer::guards_intact() const {
  const auto is_guard = [](std::byte b) { return b == kGuard; };
  return std::all_of(bytes_.begin(), bytes_.begin() + kGuardBytes, is_guard) &&
         std::all_of(bytes_.end() - kGuardBytes, bytes_.end(), is_guard);
}

OwnedTensor::OwnedTensor(DType dtype, std::initializer_list<int64_t> shape)
    : layout_(Tensor::contiguous(nullptr, dtype, shape)), buffer_(layout_.num_elements(), dtype) {}

OwnedTensor::OwnedTensor(DType dtype, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride,
                         int64_t num_elements)
    : layout_(Tensor::strided(nullptr, dtype, shape, stride)), buffer_(num_elements, dtype) {}

Placed::Placed(OwnedTensor& tensor, Device device) : tensor_(tensor), device_(device) {
  if (device.kind == DeviceKind::cpu) return;
  auto& bytes = tensor.buffer().bytes();
  memory_ = DeviceMemory(device, static_cast<int64_t>(bytes.size()));
  memory_.copy_from_host(bytes.data());
}

Tensor Placed::on_device(Tensor view) const {
  if (device_.kind == DeviceKind::cpu || !view.is_given()) return view;
  const auto offset = static_cast<std::byte*>(view.data) - tensor_.buffer().bytes().data();
  view.data = static_cast<std::byte*>(memory_.data()) + offset;
  view.device = device_;
  return view;
}

void Placed::fetch() const {
  if (device_.kind == DeviceKind::cuda) memory_.copy_to_host(tensor_.buffer().bytes().data());
}

void store(const Tensor& tensor, std::initializer_list<int64_t> index, float value) {
  auto* address = static_cast<std::byte*>(tensor.data) + offset_of(tensor, index) * size_bytes(tensor.dtype);
  if (tensor.dtype == DType::f32) {
    std::memcpy(address, &value, sizeof(value));
    return;
  }
  if (tensor.dtype == DType::i8) {
    *address = std::byte{static_cast<uint8_t>(to_int8(value))};
    return;
  }
  const uint16_t bits = to_bits(value, format_of(tensor.dtype));
  std::memcpy(address, &bits, size_bytes(tensor.dtype));  // the low byte comes first
}

float load(const Tensor& tensor, std::initializer_list<int64_t> index) {
  const auto* address =
      static_cast<const std::byte*>(tensor.data) + offset_of(tensor, index) * size_bytes(tensor.dtype);
  if (tensor.dtype == DType::f32) {
    float value;
    std::memcpy(&value, address, sizeof(value));
    return value;
  }
  if (tensor.dtype == DType::i8) return static_cast<float>(std::to_integer<int8_t>(*address));
  uint16_t bits = 0;
  std::memcpy(&bits, address, size_bytes(tensor.dtype));
  return from_bits(bits, format_of(tensor.dtype));
}

bool is_float8(DType dtype) { return dtype == DType::f8e4m3 || dtype == DType::f8e5m2; }
bool is_8bit(DType dtype) { return size_bytes(dtype) == 1; }

namespace {

// From small ones, with which numbers of size 1 saturate, to such that leave of them a few steps.
float draw_scale(Draw& draw) {
  return std::ldexp(1.0F + static_cast<float>(draw.range(0, 1023)) / 1024, static_cast<int32_t>(draw.range(-10, -2)));
}

}  // namespace

CaseData::CaseData(const Case& c) : case_(c) {
  Draw draw(c.seed ^ 0xDA7AULL, c.index);
  make_lengths(c);
  make_query(c, draw);
  make_tokens(c, draw);
  if (c.layer.cache) make_cache(c, draw);
  if (is_float8(c.layer.out_dtype())) {
    given_out_scale_ = draw_scale(draw);
    out_scale = output_scale(num_tokens + c.extra_rows, c.layer.num_q_heads);
  }
  make_operands(c, draw);
  if (c.layer.alibi_per_request) {
    for (size_t i = 0; i < c.requests.size() * c.layer.num_q_heads; ++i) {
      alibi_slopes.push_back(0.05F * static_cast<float>(draw.range(0, 10)));
    }
  }
}

OwnedTensor CaseData::output_scale(int64_t num_rows, int64_t num_heads) const {
  const LayerSpec& layer = case_.layer;
  if (!is_float8(layer.out_dtype())) return {};
  if (layer.output_scales == OutputScales::per_tensor) {
    OwnedTensor scale(DType::f32, {1});
    store(scale.view(), {0}, given_out_scale_);
    return scale;
  }
  const int64_t groups = (layer.value_dim() + kScaleGroup - 1) / kScaleGroup;
  const int64_t row = num_heads * (groups + 1) + 2;
  return {DType::f32, {num_rows, num_heads, groups}, {row, groups + 1, 1}, num_rows * row};
}

void CaseData::make_lengths(const Case& c) {
  query_start_loc.push_back(0);
  for (const RequestLengths& request : c.requests) {
    query_start_loc.push_back(query_start_loc.back() + request.q_len);
    seq_lens.push_back(request.kv_len);
    num_keys += request.kv_len;
    num_shown_keys += tools::num_shown_keys(c.layer, request);
  }
  num_tokens = query_start_loc.back();
}

// Of a whole request and head.
static float load_scale(KvScales granularity, const OwnedTensor& scales, int64_t request, int64_t head) {
  switch (granularity) {
    case KvScales::per_tensor:
      return load(scales.view(), {0});
    case KvScales::per_head:
      return load(scales.view(), {head});
    case KvScales::per_request_head:
      return load(scales.view(), {request, head});
    default:
      return 1;
  }
}

void CaseData::make_query(const Case& c, Draw& draw) {
  const LayerSpec& layer = c.layer;
  query = OwnedTensor(layer.query_dtype, {num_tokens + c.extra_rows, layer.num_q_heads, layer.head_dim});
  const bool scaled = is_float8(layer.query_dtype);
  if (scaled) query_scale = draw_scales(c.query_scales, draw);
  for (size_t r = 0; r < c.requests.size(); ++r) {
    for (int64_t t = query_start_loc[r]; t < query_start_loc[r + 1]; ++t) {
      for (int64_t h = 0; h < layer.num_q_heads; ++h) {
        const auto request = static_cast<int64_t>(r);
        const float scale = scaled ? load_scale(c.query_scales, query_scale, request, h / layer.group_size()) : 1;
        for (int64_t d = 0; d < layer.head_dim; ++d)
          store(query.view(), {t, h, d}, c.magnitude * draw.normal() / scale);
      }
    }
  }
}

void CaseData::make_tokens(const Case& c, Draw& draw) {
  const LayerSpec& layer = c.layer;
  if (layer.cache) return;
  key = OwnedTensor(layer.kv_dtype, {num_shown_keys + c.extra_rows, layer.num_kv_heads, layer.head_dim});
  value = OwnedTensor(layer.kv_dtype, {num_shown_keys + c.extra_rows, layer.num_kv_heads, layer.value_dim()});
  for (OwnedTensor* scales : {&key_scale, &value_scale}) *scales = draw_scales(layer.kv_scales, draw);
  int64_t t = 0;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    for (int32_t i = 0; i < tools::num_shown_keys(layer, c.requests[r]); ++i, ++t) {
      for (int64_t h = 0; h < layer.num_kv_heads; ++h) {
        const auto fill = [&](const Tensor& rows, OwnedTensor& scales, int64_t dim) {
          if (layer.kv_scales == KvScales::per_token_head) store(scales.view(), {t, h, 0}, draw_scale(draw));
          const float scale = scale_of(scales, static_cast<int64_t>(r), h, {t, h, 0});
          for (int64_t d = 0; d < dim; ++d) store(rows, {t, h, d}, draw.normal() / scale);
        };
        fill(key.view(), key_scale, layer.head_dim);
        fill(value.view(), value_scale, layer.value_dim());
      }
    }
  }
}

namespace {

// An allocation of pages in the given order of axes. Returns strides for [page, token, head, element].
OwnedTensor allocate_pages(DType dtype, const CacheLayout& layout, int64_t num_pages, int64_t page_size,
                           int64_t num_heads, int64_t row) {
  int64_t step = row + layout.row_padding;
  int64_t stride_p = 0;
  int64_t stride_t = 0;
  int64_t stride_h = 0;
  for (auto axis = layout.axes.rbegin(); axis != layout.axes.rend(); ++axis) {
    int64_t& stride = *axis == 'p' ? stride_p : *axis == 't' ? stride_t : stride_h;
    const int64_t extent = *axis == 'p' ? num_pages : *axis == 't' ? page_size : num_heads;
    stride = extent == 1 && layout.odd_singleton_strides ? 7 : step;
    step *= extent;
  }
  return OwnedTensor(dtype, {num_pages, page_size, num_heads, row}, {stride_p, stride_t, stride_h, 1}, step);
}

}  // namespace

void CaseData::make_cache(const Case& c, Draw& draw) {
  const LayerSpec& layer = c.layer;
  const int64_t page_size = layer.cache->page_size;
  int64_t used_pages = 0;
  for (const int32_t length : seq_lens) {
    const int64_t pages = (layer.shard.local_length(length) + page_size - 1) / page_size;
    used_pages += pages;
    table_width = std::max(table_width, pages);
  }
  table_width += draw.range(0, 2);
  const int64_t num_pages = used_pages + draw.range(draw.one_in(3) ? 0 : 1, 3);  // some pages are nobody's

  const auto allocate = [&](int64_t row) {
    return allocate_pages(layer.kv_dtype, c.layout, num_pages, page_size, layer.num_kv_heads, row);
  };
  if (c.layout.interleaved) {
    key_pages = allocate(layer.head_dim + layer.value_dim());
    const KvCache cache = KvCache::from_interleaved(key_pages.view().swap_axes(1, 2), layer.head_dim);
    key_cache = cache.key;
    value_cache = cache.value;
  } else {
    key_pages = allocate(layer.head_dim);
    value_pages = allocate(layer.value_dim());
    key_cache = key_pages.view();
    value_cache = value_pages.view();
  }

  for (OwnedTensor* scales : {&key_scale, &value_scale}) *scales = draw_scales(layer.kv_scales, draw);

  std::vector<int32_t> free_pages(num_pages);
  std::iota(free_pages.begin(), free_pages.end(), 0);
  for (size_t i = free_pages.size(); i > 1; --i) std::swap(free_pages[i - 1], free_pages[draw.range(0, i - 1)]);
  const std::vector<int32_t> junk = {-1, 0, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
  for (const int32_t length : seq_lens) {
    for (int64_t i = 0; i < table_width; ++i) {
      if (i * page_size < layer.shard.local_length(length)) {
        block_table.push_back(free_pages.back());
        free_pages.pop_back();
      } else {
        block_table.push_back(draw.pick(junk));
      }
    }
  }
  for (const PrefixGroup& group :
       c.prefix_groups) {  // larger groups first: the nested ones' first requests follow them
    for (const int32_t request : group.requests) {
      for (int64_t i = 0; i * page_size < layer.shard.local_length(group.num_tokens); ++i) {
        block_table[request * table_width + i] = block_table[group.requests.front() * table_width + i];
      }
    }
  }

  // Keys of the context lie in the cache; the new ones come through update_cache. Cross attention writes all.
  std::vector<std::pair<size_t, int32_t>> new_keys;  // (request, position)
  for (size_t r = 0; r < c.requests.size(); ++r) {
    const RequestLengths& request = c.requests[r];
    const bool cross = layer.type == AttentionType::encoder_decoder;
    const int32_t first_new = cross ? 0 : request.kv_len - request.q_len;
    for (int32_t position = std::min(first_new, 0); position < request.kv_len; ++position) {
      const bool is_own = position >= 0 && layer.shard.rank_of(position) == layer.shard.rank;
      const int64_t local = is_own ? layer.shard.local_position(position) : 0;
      const int64_t entry = is_own ? block_table[r * table_width + local / page_size] : -1;
      const int64_t offset = local % page_size;
      if (position >= first_new) {
        slot_mapping.push_back(is_own ? entry * page_size + offset : -1);
        slot_requests.push_back(static_cast<int64_t>(r));
        new_keys.emplace_back(r, position);
        continue;
      }
      for (int64_t h = 0; is_own && h < layer.num_kv_heads; ++h) {
        const auto fill = [&](const Tensor& pages, OwnedTensor& scales, int64_t dim) {
          if (layer.kv_scales == KvScales::per_token_head) {
            store(scales.view(), {entry, offset, h}, draw_scale(draw));
          }
          const float scale = scale_of(scales, static_cast<int64_t>(r), h, {entry, offset, h});
          for (int64_t d = 0; d < dim; ++d) store(pages, {entry, offset, h, d}, draw.normal() / scale);
        };
        fill(key_cache, key_scale, layer.head_dim);
        fill(value_cache, value_scale, layer.value_dim());
      }
    }
  }
  const DType new_dtype = is_float8(layer.query_dtype) ? DType::f16 : layer.query_dtype;
  const auto rows = static_cast<int64_t>(new_keys.size());
  key = OwnedTensor(new_dtype, {rows + c.extra_rows, layer.num_kv_heads, layer.head_dim});
  value = OwnedTensor(new_dtype, {rows + c.extra_rows, layer.num_kv_heads, layer.value_dim()});
  for (int64_t t = 0; t < rows; ++t) {
    if (slot_mapping[t] < 0) continue;  // stays NaN: nobody may read it
    for (int64_t h = 0; h < layer.num_kv_heads; ++h) {
      for (int64_t d = 0; d < layer.head_dim; ++d) store(key.view(), {t, h, d}, draw.normal());
      for (int64_t d = 0; d < layer.value_dim(); ++d) store(value.view(), {t, h, d}, draw.normal());
    }
  }
}

void CaseData::make_operands(const Case& c, Draw& draw) {
  std::vector<PrefixLmSpan> spans;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    int64_t start = draw.range(0, 20);
    for (int32_t i = 0; i < 3; ++i) {
      const int64_t end = start + draw.range(0, 30);
      if (!draw.one_in(3)) {
        spans.push_back({static_cast<int32_t>(r), static_cast<int32_t>(start), static_cast<int32_t>(end)});
      }
      start = end + draw.range(1, 25);
    }
  }
  const Tensor starts = view_of(query_start_loc);
  const PrefixLmOperands prefix_lm = fill_prefix_lm_spans(spans, starts, view_of(seq_lens));
  std::vector<int32_t> parents;
  for (const RequestLengths& request : c.requests) {
    for (int32_t i = 0; i < request.q_len; ++i)
      parents.push_back(static_cast<int32_t>(draw.range(std::max(-1, i - 4), i - 1)));
  }
  const TreeOperands tree = fill_tree(parents, starts);

  for (const OperandDeclaration& declared : operands_of(c.layer.effective_mask())) {
    std::vector<int32_t> values;
    if (declared.name == "span_start") {
      values = prefix_lm.span_start;
    } else if (declared.name == "span_end") {
      values = prefix_lm.span_end;
    } else if (declared.name == "tree_enter") {
      values = tree.tree_enter;
    } else if (declared.name == "tree_leave") {
      values = tree.tree_leave;
    } else {
      const int64_t count = declared.scope == OperandScope::request ? static_cast<int64_t>(c.requests.size())
                            : declared.scope == OperandScope::key   ? num_keys
                                                                    : num_tokens;
      const bool flag = declared.name == "causal";
      const bool document = declared.name.ends_with("_document");
      for (int64_t i = 0; i < count; ++i) {
        values.push_back(static_cast<int32_t>(flag ? draw.range(0, 1) : document ? i / 20 % 5 : draw.range(-2, 60)));
      }
    }
    operands.emplace_back(declared.name, std::move(values));
  }
}

OwnedTensor CaseData::draw_scales(KvScales granularity, Draw& draw) const {
  const int64_t num_heads = case_.layer.num_kv_heads;
  const auto num_requests = static_cast<int64_t>(case_.requests.size());
  OwnedTensor scales;
  switch (granularity) {
    case KvScales::none:
      break;
    case KvScales::per_tensor:
      scales = OwnedTensor(DType::f32, {1}, {5}, 1);
      store(scales.view(), {0}, draw_scale(draw));
      break;
    case KvScales::per_head:
      scales = OwnedTensor(DType::f32, {num_heads}, {2}, 2 * num_heads);
      for (int64_t h = 0; h < num_heads; ++h) store(scales.view(), {h}, draw_scale(draw));
      break;
    case KvScales::per_request_head:
      scales = OwnedTensor(DType::f32, {num_requests, num_heads}, {1, num_requests}, num_requests * num_heads);
      for (int64_t r = 0; r < num_requests; ++r) {
        for (int64_t h = 0; h < num_heads; ++h) store(scales.view(), {r, h}, draw_scale(draw));
      }
      break;
    case KvScales::per_token_head: {
      if (!case_.layer.cache) {
        const int64_t rows = key.view().shape[0];
        return OwnedTensor(DType::f32, {rows, num_heads, 1}, {1, rows + 3, 5}, (rows + 3) * num_heads);
      }
      const int64_t page_size = case_.layer.cache->page_size;
      const int64_t num_pages = key_cache.shape[0];
      scales = OwnedTensor(DType::f32, {num_pages, page_size, num_heads}, {page_size * num_heads, 1, page_size},
                           num_pages * page_size * num_heads);
      break;
    }
  }
  return scales;
}

float CaseData::scale_of(const OwnedTensor& scales, int64_t request, int64_t head,
                         std::initializer_list<int64_t> of_token) const {
  const KvScales granularity = case_.layer.kv_scales;
  if (granularity == KvScales::per_token_head) return load(scales.view(), of_token);
  return load_scale(granularity, scales, request, head);
}

KvCache CaseData::cache() { return {key_cache, value_cache, key_scale.view(), value_scale.view()}; }

Batch CaseData::batch() const {
  Batch batch;
  batch.query_start_loc = view_of(query_start_loc);
  const bool encoder = case_.layer.type == AttentionType::encoder || case_.layer.type == AttentionType::encoder_only;
  if (!encoder || case_.with_seq_lens) batch.seq_lens = view_of(seq_lens);
  if (case_.layer.cache) {
    batch.block_table =
        Tensor::contiguous(block_table.data(), DType::i32, {static_cast<int64_t>(seq_lens.size()), table_width});
    batch.slot_mapping = view_of(slot_mapping);
    batch.prefix_sharing = case_.prefix_sharing;
    batch.prefix_sharing_keeps_bits = case_.prefix_sharing_keeps_bits;
    if (case_.with_prefix_groups) batch.prefix_groups = case_.prefix_groups;
  }
  for (const auto& [name, values] : operands) batch.mask_operands.push_back({name, view_of(values)});
  if (case_.layer.alibi_per_request) {
    batch.alibi_slopes = Tensor::contiguous(alibi_slopes.data(), DType::f32,
                                            {static_cast<int64_t>(seq_lens.size()), case_.layer.num_q_heads});
  }
  return batch;
}

}  // namespace qkv::tools
