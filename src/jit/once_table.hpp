// Key to value, each made once: different keys at the same time, one key by whoever asks first while others wait.
#pragma once

#include <future>
#include <map>
#include <mutex>

namespace qkv::jit {

template <class Key, class Value>
class OnceTable {
 public:
  // The value stays where it is for the table's life. If make() throws, all that wait get the exception, and the next
  // to ask tries again.
  template <class Make>
  const Value& get(const Key& key, Make make) {
    std::promise<Value> promise;
    std::shared_future<Value> value;
    bool mine = false;
    {
      const std::lock_guard lock(mutex_);
      const auto [entry, inserted] = values_.try_emplace(key);
      if (inserted) entry->second = promise.get_future().share();
      value = entry->second;
      mine = inserted;
    }
    if (mine) {
      try {
        promise.set_value(make());
      } catch (...) {
        forget(key);
        promise.set_exception(std::current_exception());
      }
    }
    return value.get();
  }

 private:
  void forget(const Key& key) {
    const std::lock_guard lock(mutex_);
    values_.erase(key);
  }

  std::mutex mutex_;
  std::map<Key, std::shared_future<Value>> values_;  // keeps the values alive
};

}  // namespace qkv::jit
