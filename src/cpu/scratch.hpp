// Memory that a thread keeps from task to task: it only grows, so the steady state allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace qkv::cpu {

// At least the elements last asked for, 64-byte aligned, contents undefined.
template <class T>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  T* reserve(int64_t count) {
    if (count > capacity_) {
      release();
      data_ = static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
      capacity_ = count;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void release() {
    ::operator delete(data_, kAlignment);
    data_ = nullptr;
    capacity_ = 0;
  }

  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace qkv::cpu
