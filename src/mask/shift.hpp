// A request's mask, written for an engine that is shown only a run of its keys: the context's, from the first on, or
// the new tokens'. The engine counts positions as if the run were all the keys that there are; operands tell the mask
// how far that is from the request's own count. So windows and every other mask keep their meaning, and tiles outside
// of them are still found by interval arithmetic.
#pragma once

#include "qkv/mask.hpp"
#include "qkv/shard.hpp"

namespace qkv::mask {

// Operands of scope request that the shifted mask reads, where it reads them.
inline constexpr const char* kPositionShift = "qkv_position_shift";  // context tokens + new tokens - keys of the run
inline constexpr const char* kKeyShift = "qkv_key_shift";            // position of the run's first key
inline constexpr const char* kRequestNumber = "qkv_request_number";  // in the whole batch

Mask shift(const Mask& mask, KeyRun run);

// The mask of a layer that has the heads from first_head on, numbered from 0.
Mask with_first_head(const Mask& mask, int32_t first_head);

}  // namespace qkv::mask
