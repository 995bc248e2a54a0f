#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "qkv/collectives.hpp"

namespace qkv::test {

// Runs the body for each rank on a thread of its own, which owns the rank's object: who is done has left.
inline void on_each_rank(std::vector<std::shared_ptr<Collectives>> ranks,
                         const std::function<void(const std::shared_ptr<Collectives>&)>& body) {
  std::vector<std::thread> threads;
  threads.reserve(ranks.size());
  for (auto& rank : ranks) {
    threads.emplace_back([&body, own = std::move(rank)]() mutable {
      body(own);
      own.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace qkv::test
