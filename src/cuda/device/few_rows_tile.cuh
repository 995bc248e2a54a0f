// Constants of the few-rows kernel that its parts share, and how its tiles lie in shared memory.
#pragma once

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "core/index/swizzled_tile.hpp"
#include "dtype_codes.cuh"

namespace qkv::cuda::few_rows {

namespace shape = index::few_rows;

constexpr bool kIs8Bit = is_8bit(key::kv_dtype);
constexpr bool kFloat8Query = is_float8(key::query_dtype);  // then keys have 8 bits, too
constexpr bool kMathBf16 = key::is_bf16 && !kIs8Bit;        // else f16, which holds every number of all 8-bit formats
constexpr int kElementBytes = size_of(key::kv_dtype);
constexpr shape::KeyValueShape kKeyValue{key::head_dim, key::head_dim_v, kElementBytes, key::token_scales,
                                         key::group_scales ? shape::group_vectors(key::head_dim_v) : 1};
static_assert(kIs8Bit || !kFloat8Query);
constexpr int kThreads = key::num_warps * shape::kWarpSize;
constexpr bool kSharedRows = key::request_tile_q < key::tile_q;  // an item's rows are of several requests
constexpr int kNumLanes = shape::num_lanes(key::request_tile_q, key::head_dim_v);
constexpr int kTileKeys = key::tile_kv;
constexpr int kBoxes = kTileKeys / shape::kBoxKeys;
constexpr bool kSmallTile = kBoxes <= 2;  // else a tile's numbers fill the registers: what can be made again isn't held
constexpr bool kPaged = key::page_size > 0;
constexpr bool kCopyBoxes = key::page_size % shape::kBoxKeys == 0;  // dense keys, too
constexpr shape::SmemLayout kLayout = shape::smem_layout(kKeyValue, key::tile_q, key::tile_kv, key::num_warps,
                                                         key::num_stages, key::cluster_size, key::request_tile_q);
constexpr int kReceivedBarrier = kLayout.barriers + 2 * key::num_warps * key::num_stages * shape::kBarrierBytes;

using KeyBox = index::SwizzledTile<kKeyValue.key_bytes(), shape::kBoxKeys>;
using ValueBox = index::SwizzledTile<kKeyValue.value_bytes(), shape::kBoxKeys>;
using QueryTile = index::SwizzledTile<key::head_dim * shape::kQueryBytes, key::tile_q>;

}  // namespace qkv::cuda::few_rows
