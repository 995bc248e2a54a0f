#include "cuda/block_cache.hpp"

namespace qkv::cuda {

size_t BlockCache::bytes_to_ask(size_t bytes) {
  constexpr size_t kGranularity = 4096;
  return (bytes + bytes / 4 + kGranularity - 1) / kGranularity * kGranularity;
}

std::optional<Block> BlockCache::take(size_t bytes, jit::CUstream stream) {
  auto best = kept_.end();
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    const size_t size = kept->block.bytes;
    if (kept->stream != stream || size < bytes || size > 2 * bytes_to_ask(bytes)) continue;
    if (best == kept_.end() || size < best->block.bytes) best = kept;
  }
  if (best == kept_.end()) return {};
  const Block block = best->block;
  kept_bytes_ -= block.bytes;
  kept_.erase(best);
  return block;
}

std::vector<Block> BlockCache::give(Block block, jit::CUstream stream) {
  kept_.push_back({block, stream});
  kept_bytes_ += block.bytes;
  std::vector<Block> excess;
  while (kept_bytes_ > max_kept_bytes_) {
    excess.push_back(kept_.front().block);
    kept_bytes_ -= kept_.front().block.bytes;
    kept_.pop_front();
  }
  return excess;
}

std::vector<Block> BlockCache::drain() {
  std::vector<Block> all;
  for (const Kept& kept : kept_) all.push_back(kept.block);
  kept_.clear();
  kept_bytes_ = 0;
  return all;
}

}  // namespace qkv::cuda
