// A case's memory: everything that a request does not own is NaN, and every output lies between guard words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cases.hpp"
#include "qkv/attention.hpp"
#include "qkv/batch.hpp"
#include "qkv/cuda.hpp"

namespace qkv::tools {

// Memory for a tensor, filled with NaN (integers: junk), with guard words on both sides.
class GuardedBuffer {
 public:
  static constexpr size_t kGuardBytes = 256;
  GuardedBuffer() = default;
  GuardedBuffer(int64_t num_elements, DType dtype);
  void* data() { return bytes_.data() + kGuardBytes; }
  const void* data() const { return bytes_.data() + kGuardBytes; }
  // Guard words included: what is copied to a device and back.
  std::vector<std::byte>& bytes() { return bytes_; }
  // Guard words left out.
  int64_t num_bytes() const { return bytes_.empty() ? 0 : static_cast<int64_t>(bytes_.size() - 2 * kGuardBytes); }
  bool guards_intact() const;
  bool operator==(const GuardedBuffer& other) const { return bytes_ == other.bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

// A tensor with its memory; `store` and `load` convert from and to float.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape);
  OwnedTensor(DType dtype, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> stride,
              int64_t num_elements);

  Tensor view() { return with_data(buffer_.data()); }
  Tensor view() const { return with_data(const_cast<void*>(buffer_.data())); }  // NOLINT: callees only read
  GuardedBuffer& buffer() { return buffer_; }
  const GuardedBuffer& buffer() const { return buffer_; }

 private:
  Tensor with_data(void* data) const {
    Tensor view = layout_;
    view.data = data;
    return view;
  }
  Tensor layout_;
  GuardedBuffer buffer_;
};

// A tensor where the engine under test reads and writes it: the memory itself, or its copy on a GPU.
class Placed {
 public:
  Placed(OwnedTensor& tensor, Device device);
  // `view`: of the tensor, or of a part of it.
  Tensor on_device(Tensor view) const;
  Tensor view() const { return on_device(tensor_.view()); }
  // Brings what the engine wrote back into the tensor.
  void fetch() const;

 private:
  OwnedTensor& tensor_;
  Device device_;
  DeviceMemory memory_;
};

bool is_float8(DType dtype);
bool is_8bit(DType dtype);

// Columns of a head of an 8-bit output that share a scale, where scales are of groups.
inline constexpr int64_t kScaleGroup = 128;

// Conversions of the tool's own: rounding to nearest even, 8-bit elements saturate.
void store(const Tensor& tensor, std::initializer_list<int64_t> index, float value);
float load(const Tensor& tensor, std::initializer_list<int64_t> index);

struct CaseData {
  explicit CaseData(const Case& c);  // keeps a reference: the case must outlive its data
  explicit CaseData(Case&&) = delete;

  Batch batch() const;
  KvCache cache();  // of layers with a cache
  // What the elements of a row of keys or values are multiplied by. `scales` is key_scale or value_scale; `of_token`
  // the index there of scales of tokens: {page, offset, head}, dense {row, head, 0}.
  float scale_of(const OwnedTensor& scales, int64_t request, int64_t head,
                 std::initializer_list<int64_t> of_token) const;
  // The out_scale of a call with so many rows and heads: the one that is given, or memory at odd strides for those that
  // are chosen; nothing where outputs are not of 8 bits.
  OwnedTensor output_scale(int64_t num_rows, int64_t num_heads) const;
  int64_t num_tokens = 0;
  int64_t num_keys = 0;        // of whole requests
  int64_t num_shown_keys = 0;  // to the layer

  OwnedTensor query;
  OwnedTensor key, value;              // dense keys, or the new tokens for update_cache
  OwnedTensor key_pages, value_pages;  // the cache; interleaved ones live in key_pages
  Tensor key_cache, value_cache;       // views of it
  OwnedTensor key_scale, value_scale;  // of 8-bit keys and values
  OwnedTensor out_scale;               // of outputs of 8-bit floats; chosen ones of all rows
  OwnedTensor query_scale;             // of queries of 8-bit floats
  std::vector<int32_t> query_start_loc, seq_lens, block_table;
  int64_t table_width = 0;
  std::vector<int64_t> slot_mapping, slot_requests;
  std::vector<float> alibi_slopes;
  std::vector<std::pair<std::string, std::vector<int32_t>>> operands;

 private:
  void make_lengths(const Case& c);
  void make_query(const Case& c, Draw& draw);
  void make_tokens(const Case& c, Draw& draw);
  void make_cache(const Case& c, Draw& draw);
  // All different, none of them 1, and at odd strides. Those of tokens are written with the tokens.
  OwnedTensor draw_scales(KvScales granularity, Draw& draw) const;
  void make_operands(const Case& c, Draw& draw);

  const Case& case_;
  float given_out_scale_ = 1;
};

}  // namespace qkv::tools
