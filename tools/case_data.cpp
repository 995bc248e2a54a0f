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
// In every float format these bytes repeat to a NaN: f32 0xFFFFFFFF, 16-bit 0xFFFF.
constexpr std::byte kPoison{0xFF};

// Round to nearest even by arithmetic on doubles, apart from the library's own conversions, which are under test.
uint16_t to_16_bits(float value, int32_t mantissa_bits, int32_t min_exponent, uint16_t infinity) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | infinity | (infinity >> 1);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  const int32_t exponent = std::max(std::ilogb(magnitude), min_exponent);
  if (std::isinf(magnitude)) return sign | infinity;
  const double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  // A biased exponent of 1 stands for min_exponent; subnormals lack the leading bit and so land on 0 by themselves.
  const double bits = steps + static_cast<double>(exponent - min_exponent) * std::ldexp(1.0, mantissa_bits);
  return sign | static_cast<uint16_t>(std::min(bits, static_cast<double>(infinity)));
}

float from_16_bits(uint16_t bits, int32_t mantissa_bits, int32_t min_exponent, uint16_t infinity) {
  const int32_t magnitude = bits & 0x7FFF;
  double value = 0;
  if (magnitude > infinity) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (magnitude == infinity) {
    value = std::numeric_limits<double>::infinity();
  } else {
    const int32_t biased = magnitude >> mantissa_bits;
    const int32_t mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const int32_t leading = biased == 0 ? 0 : 1 << mantissa_bits;
    value = std::ldexp(leading + mantissa, min_exponent + std::max(biased, 1) - 1 - mantissa_bits);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
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
    : bytes_(2 * kGuardBytes + static_cast<size_t>(num_elements * size_bytes(dtype)), kPoison) {
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
  const uint16_t bits =
      tensor.dtype == DType::bf16 ? to_16_bits(value, 7, -126, 0x7F80) : to_16_bits(value, 10, -14, 0x7C00);
  std::memcpy(address, &bits, sizeof(bits));
}

float load(const Tensor& tensor, std::initializer_list<int64_t> index) {
  const auto* address =
      static_cast<const std::byte*>(tensor.data) + offset_of(tensor, index) * size_bytes(tensor.dtype);
  if (tensor.dtype == DType::f32) {
    float value;
    std::memcpy(&value, address, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, address, sizeof(bits));
  return tensor.dtype == DType::bf16 ? from_16_bits(bits, 7, -126, 0x7F80) : from_16_bits(bits, 10, -14, 0x7C00);
}

CaseData::CaseData(const Case& c) : case_(c) {
  Draw draw(c.seed ^ 0xDA7AULL, c.index);
  make_lengths(c);
  make_tokens(c, draw);
  if (c.layer.cache) make_cache(c, draw);
  make_operands(c, draw);
  if (c.layer.alibi_per_request) {
    for (size_t i = 0; i < c.requests.size() * c.layer.num_q_heads; ++i) {
      alibi_slopes.push_back(0.05F * static_cast<float>(draw.range(0, 10)));
    }
  }
}

void CaseData::make_lengths(const Case& c) {
  query_start_loc.push_back(0);
  for (const RequestLengths& request : c.requests) {
    query_start_loc.push_back(query_start_loc.back() + request.q_len);
    seq_lens.push_back(request.kv_len);
    num_keys += request.kv_len;
  }
  num_tokens = query_start_loc.back();
}

void CaseData::make_tokens(const Case& c, Draw& draw) {
  const LayerSpec& layer = c.layer;
  query = OwnedTensor(layer.query_dtype, {num_tokens + c.extra_rows, layer.num_q_heads, layer.head_dim});
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t h = 0; h < layer.num_q_heads; ++h) {
      for (int64_t d = 0; d < layer.head_dim; ++d) store(query.view(), {t, h, d}, c.magnitude * draw.normal());
    }
  }
  if (layer.cache) return;
  key = OwnedTensor(layer.kv_dtype, {num_keys + c.extra_rows, layer.num_kv_heads, layer.head_dim});
  value = OwnedTensor(layer.kv_dtype, {num_keys + c.extra_rows, layer.num_kv_heads, layer.value_dim()});
  for (int64_t t = 0; t < num_keys; ++t) {
    for (int64_t h = 0; h < layer.num_kv_heads; ++h) {
      for (int64_t d = 0; d < layer.head_dim; ++d) store(key.view(), {t, h, d}, draw.normal());
      for (int64_t d = 0; d < layer.value_dim(); ++d) store(value.view(), {t, h, d}, draw.normal());
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
    const int64_t pages = (length + page_size - 1) / page_size;
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

  std::vector<int32_t> free_pages(num_pages);
  std::iota(free_pages.begin(), free_pages.end(), 0);
  for (size_t i = free_pages.size(); i > 1; --i) std::swap(free_pages[i - 1], free_pages[draw.range(0, i - 1)]);
  const std::vector<int32_t> junk = {-1, 0, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
  for (const int32_t length : seq_lens) {
    for (int64_t i = 0; i < table_width; ++i) {
      if (i * page_size < length) {
        block_table.push_back(free_pages.back());
        free_pages.pop_back();
      } else {
        block_table.push_back(draw.pick(junk));
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
      const int64_t entry = position < 0 ? -1 : block_table[r * table_width + position / page_size];
      const int64_t offset = position < 0 ? 0 : position % page_size;
      if (position >= first_new) {
        slot_mapping.push_back(position < 0 ? -1 : entry * page_size + offset);
        new_keys.emplace_back(r, position);
        continue;
      }
      for (int64_t h = 0; h < layer.num_kv_heads; ++h) {
        for (int64_t d = 0; d < layer.head_dim; ++d) store(key_cache, {entry, offset, h, d}, draw.normal());
        for (int64_t d = 0; d < layer.value_dim(); ++d) store(value_cache, {entry, offset, h, d}, draw.normal());
      }
    }
  }
  const DType new_dtype = layer.query_dtype;
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

KvCache CaseData::cache() { return {key_cache, value_cache}; }

Batch CaseData::batch() const {
  Batch batch;
  batch.query_start_loc = view_of(query_start_loc);
  const bool encoder = case_.layer.type == AttentionType::encoder || case_.layer.type == AttentionType::encoder_only;
  if (!encoder || case_.with_seq_lens) batch.seq_lens = view_of(seq_lens);
  if (case_.layer.cache) {
    batch.block_table =
        Tensor::contiguous(block_table.data(), DType::i32, {static_cast<int64_t>(seq_lens.size()), table_width});
    batch.slot_mapping = view_of(slot_mapping);
  }
  for (const auto& [name, values] : operands) batch.mask_operands.push_back({name, view_of(values)});
  if (case_.layer.alibi_per_request) {
    batch.alibi_slopes = Tensor::contiguous(alibi_slopes.data(), DType::f32,
                                            {static_cast<int64_t>(seq_lens.size()), case_.layer.num_q_heads});
  }
  return batch;
}

}  // namespace qkv::tools
