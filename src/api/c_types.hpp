// From the structs of qkv.h to those of C++. Whatever a C caller can get wrong that C++ types rule out is refused here:
// null pointers, unknown enumerators, ranks, negative counts, structs that nobody set up.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/checks.hpp"
#include "qkv/mla_prefill.hpp"
#include "qkv/ops.hpp"
#include "qkv/qkv.h"

namespace qkv::api {

qkv_status to_c(ErrorCode code);

// Inside a catch block: keeps what was caught as the thread's last error, and returns its status.
qkv_status keep_current_exception() noexcept;

// The status of a call that may throw: nothing is thrown across the boundary.
template <class Call>
qkv_status guarded(const Call& call) noexcept {
  try {
    call();
    return QKV_OK;
  } catch (...) {
    return keep_current_exception();
  }
}

// Into a buffer of the caller's, as qkv.h says.
void copy_text(const std::string& source, char* text, size_t capacity, size_t* needed);

// The object behind a pointer that must be given.
template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) refuse(name, "a null pointer", "the address of a valid object");
  return *pointer;
}

// Makes the object behind a new handle, which is NULL on failure.
template <class Handle, class Make>
qkv_status create(Handle** handle, const char* name, const Make& make) {
  return guarded([&] {
    required(handle, name) = nullptr;
    *handle = new Handle{make()};
  });
}

// [count] elements of the caller's.
template <class T>
std::vector<T> copy_array(const T* elements, int64_t count, const std::string& name) {
  if (count < 0) refuse("num_" + name, count, "0 or more");
  if (count != 0) required(elements, name.c_str());
  return count == 0 ? std::vector<T>() : std::vector<T>(elements, elements + count);
}

// Enumerators of both interfaces have the same numbers, from 0 to the last one.
template <class Enum>
Enum enum_from_c(int32_t number, Enum last, const std::string& name) {
  const auto limit = static_cast<int32_t>(last);
  if (number < 0 || number > limit) {
    refuse(name, number, fmt::format("0 ({}) to {} ({})", to_string(Enum{}), limit, to_string(last)));
  }
  return static_cast<Enum>(number);
}

// 0 or 1, whatever the language at hand stores as true.
inline bool is_set(int32_t truth) { return truth != 0; }

// A caller compiled against an older header hands over a shorter struct, whose missing fields are 0; one compiled
// against a newer header a longer one, whose surplus must be 0. `smallest` ends before the first optional field.
template <class Struct>
Struct read_sized(const Struct* given, size_t smallest, const char* name) {
  constexpr size_t kLargest = 4096;  // a struct_size beyond is junk, which must not decide how far we read
  size_t size = 0;
  std::memcpy(&size, &required(given, name), sizeof size);
  if (size < smallest || size > kLargest) {
    refuse(fmt::format("{}.struct_size", name), size,
           fmt::format("the struct's sizeof, {} here: set it, or call the struct's init function", sizeof(Struct)));
  }
  const auto* bytes = reinterpret_cast<const char*>(given);
  for (size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      refuse(fmt::format("{}.struct_size", name), fmt::format("{}, with byte {} not 0", size, i),
             fmt::format("fields of the first {} bytes: this library is older than the program", sizeof(Struct)),
             ErrorCode::unsupported);
    }
  }
  Struct read{};
  std::memcpy(&read, bytes, std::min(size, sizeof(Struct)));
  return read;
}

// The other way: what an init function does to memory of the size that the caller knows.
template <class Struct>
void init_sized(Struct* given, size_t size) {
  if (given == nullptr || size < sizeof size) return;
  std::memset(static_cast<void*>(given), 0, size);
  std::memcpy(static_cast<void*>(given), &size, sizeof size);
}

DeviceKind device_kind_from_c(qkv_device_kind kind, const std::string& name);
Device from_c(qkv_device device, const std::string& name);
Tensor from_c(const qkv_tensor& tensor, const std::string& name);
// NULL is a tensor that is not given.
Tensor from_c(const qkv_tensor* tensor, const std::string& name);
qkv_tensor to_c(const Tensor& tensor);
KvCache from_c(const qkv_kv_cache* cache);
Mask mask_from_c(const char* text);
Shard from_c(const qkv_shard& shard);
qkv_shard to_c(const Shard& shard);
LayerSpec from_c(const qkv_layer_spec* spec);
Batch from_c(const qkv_batch* batch);
PlanLimits from_c(const qkv_plan_limits* limits);
VarlenArguments from_c(const qkv_varlen_arguments* arguments);
MlaSpec from_c(const qkv_mla_spec* spec);
ContextChunkOptions from_c(const qkv_context_chunk_options* options);
std::vector<State> from_c(const qkv_state* states, int64_t num_states);
std::vector<PrefixLmSpan> from_c(const qkv_prefix_lm_span* spans, int64_t num_spans);

}  // namespace qkv::api
