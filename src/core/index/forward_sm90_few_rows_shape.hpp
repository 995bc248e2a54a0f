// Shapes of the sm_90a few-rows kernel: splits of a request, keys of a tile, warps, shared memory. Planner, launch and
// kernel share them. What enters a row's bits (split_keys, tile_keys, num_lanes) sees only the layer and the request's
// own lengths. Warps, ring stages and clusters don't enter the bits: the launch may choose them.
#pragma once

#include "core/index/float8.hpp"
#include "core/index/host_device.hpp"
#include "core/index/split_bounds.hpp"

namespace qkv::index::few_rows {

constexpr int kWarpSize = 32;
constexpr int kBoxKeys = 16;  // keys of one tensor copy and of one mma tile
constexpr int kSmemAlignment = 1024;
constexpr int kMaxSmemBytes = 227 * 1024;
constexpr int kSmemOfSm = 228 * 1024;
constexpr int kReservedBytes = 1024;  // of a CTA, by the system
constexpr int kMaxClusterSplits = 8;
constexpr int kMaxSplits = 64;
// Of an element of a query: multiplied in 16 bits, whatever keys and values are kept in.
constexpr int kQueryBytes = 2;
constexpr int kBarrierBytes = 8;
constexpr int kTurnBytes = 16;
constexpr int kItemBytes = 64;

QKV_HOST_DEVICE constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
QKV_HOST_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// How keys and values lie in the cache. 8-bit elements are widened to 16 bits in registers.
struct KeyValueShape {
  int head_dim;
  int head_dim_v;
  int element_bytes;  // 2 or 1
  bool token_scales;  // 8 bits: each token has scales of its own, which travel with the tiles
  // Vectors of 4 elements that stay together when a cluster shares its rows: those of a group of output columns that
  // have a scale in common, which its lanes choose together.
  int share_vectors = 1;

  QKV_HOST_DEVICE constexpr int key_bytes() const { return head_dim * element_bytes; }
  QKV_HOST_DEVICE constexpr int value_bytes() const { return head_dim_v * element_bytes; }
  QKV_HOST_DEVICE constexpr int token_bytes() const { return key_bytes() + value_bytes(); }
};

// Vectors of 4 elements in a group of output columns with a scale of its own.
QKV_HOST_DEVICE constexpr int group_vectors(int head_dim_v) {
  return (head_dim_v < kScaleGroup ? head_dim_v : kScaleGroup) / 4;
}

// Whether the groups of all rows lie in aligned lanes of a warp, a power of two of them.
QKV_HOST_DEVICE constexpr bool supports_group_scales(int head_dim_v) {
  return head_dim_v < kScaleGroup ? kScaleGroup % head_dim_v == 0 : head_dim_v % kScaleGroup == 0;
}

// Packed rows of a request that the kernel can take: the output's accumulators fill 128 registers.
QKV_HOST_DEVICE constexpr int max_rows(int head_dim_v) { return head_dim_v <= 128 ? 32 : head_dim_v <= 256 ? 16 : 0; }

QKV_HOST_DEVICE constexpr bool supports(int head_dim, int head_dim_v) {
  return head_dim % 16 == 0 && head_dim_v % 16 == 0 && head_dim >= 16 && head_dim_v >= 16 && head_dim <= 256 &&
         head_dim_v <= 256;
}

// Rows that a kernel makes room for. Products take 8, 16 or 32; states of at most 4 are stored as 4.
QKV_HOST_DEVICE constexpr int tile_rows(int rows) { return rows <= 4 ? 4 : rows <= 8 ? 8 : rows <= 16 ? 16 : 32; }
QKV_HOST_DEVICE constexpr int num_row_blocks(int tile_q) { return (tile_q + 7) / 8; }

// Keys a warp takes at once: up to 16 KB of keys and values. 32 keys are two boxes, whose products don't wait for each
// other; more would only lengthen the last tile. But 32 keys of 64 columns of 8 bits are 4 KB, over which a tile's
// chain of instructions is too long. (Scales of tokens make that of 64 keys longer: batches were slower.)
QKV_HOST_DEVICE constexpr int tile_keys(const KeyValueShape& kv, int tile_q) {
  const bool is_small = kv.token_bytes() <= 128 && (kv.head_dim | kv.head_dim_v) % 32 == 0;
  if (tile_q <= 8 && is_small && !kv.token_scales) return 64;
  return tile_q <= 16 && kv.token_bytes() <= 512 ? 32 : 16;
}

// A split's tiles are dealt out to lanes, and each lane has a state of its own. A CTA has a warp a lane, or fewer
// warps, which then take one lane after another and keep the earlier states: 8 lanes where a state is at most 2 KB.
QKV_HOST_DEVICE constexpr int num_lanes(int tile_q, int head_dim_v) { return tile_q * head_dim_v <= 512 ? 8 : 4; }

// Query fragments live in registers while these are few.
QKV_HOST_DEVICE constexpr bool query_in_smem(int tile_q, int head_dim) { return tile_q * head_dim > 2048; }

// Floats between two rows of a warp's state in shared memory: 4 more, so that the lanes of a store hit 32 banks.
QKV_HOST_DEVICE constexpr int state_pitch(int head_dim_v) { return head_dim_v + 4; }

// A stage of keys or of values.
QKV_HOST_DEVICE constexpr int stage_bytes(int row_bytes, int tile_kv) {
  return round_up(tile_kv * row_bytes, kSmemAlignment);
}

// Offsets in a CTA's dynamic shared memory.
struct SmemLayout {
  int warp_bytes;     // a warp's ring; later the state of its last lane, since nothing is under way then
  int query;          // [tile_q, head_dim], swizzled
  int query_factors;  // 8 bits: of the rows in `query`
  int states;         // of the earlier lanes
  int state_bytes;
  int scales;    // [num_warps, num_stages, 2, tile_kv]: of the tokens of a stage, keys' and values'
  int received;  // states of the cluster's splits: this CTA's share of the elements
  int received_lse;
  int barriers;  // [num_warps, num_stages] for keys, the same for values, one for received states
  int flag;
  int turn;  // few_rows::CtaTurn
  int item;  // FewRowsItem, where rows are shared
  int total_bytes;
};

QKV_HOST_DEVICE constexpr SmemLayout smem_layout(const KeyValueShape& kv, int tile_q, int tile_kv, int warps,
                                                 int stages, int cluster_size, int request_tile_q) {
  constexpr int kFloat = static_cast<int>(sizeof(float));
  const int stage = stage_bytes(kv.key_bytes(), tile_kv) + stage_bytes(kv.value_bytes(), tile_kv);
  const bool in_smem = query_in_smem(tile_q, kv.head_dim);
  const bool clustered = cluster_size > 1;
  SmemLayout layout{};
  layout.state_bytes = tile_q * (state_pitch(kv.head_dim_v) + 2) * kFloat;
  layout.warp_bytes = round_up(larger(stages * stage, layout.state_bytes), kSmemAlignment);
  layout.query = warps * layout.warp_bytes;
  layout.query_factors = layout.query + (in_smem ? tile_q * kv.head_dim * kQueryBytes : 0);
  layout.states = layout.query_factors + (in_smem && kv.element_bytes == 1 ? tile_q * kFloat : 0);
  layout.scales = layout.states + (num_lanes(request_tile_q, kv.head_dim_v) - warps) * layout.state_bytes;
  layout.received = layout.scales + (kv.token_scales ? warps * stages * 2 * tile_kv * kFloat : 0);
  // A share is rounded up to whole vectors, or to groups of them, once a split.
  const int received = tile_q * kv.head_dim_v / 4 + cluster_size * kv.share_vectors;
  layout.received_lse = layout.received + (clustered ? received * 4 * kFloat : 0);
  layout.barriers = layout.received_lse + (clustered ? cluster_size * tile_q * kFloat : 0);
  layout.flag = layout.barriers + (2 * warps * stages + 1) * kBarrierBytes;
  layout.turn = layout.flag + kBarrierBytes;
  layout.item = layout.turn + kTurnBytes;
  layout.total_bytes = layout.item + (request_tile_q < tile_q ? kItemBytes : 0);
  return layout;
}

// Keys of a split at least: 128 KB of keys and values, more where states are large against them, and 256 KB of 8-bit
// rows of 128, whose CTAs come and go while 3 of them share an SM.
QKV_HOST_DEVICE constexpr int least_split_keys(const KeyValueShape& kv, int tile_q) {
  const int keys = kv.token_bytes() > 256 ? 256 : kv.element_bytes == 2 || kv.token_bytes() <= 128 ? 512 : 1024;
  return tile_q <= 8 ? keys : tile_q <= 16 ? 2 * keys : 8 * keys;
}

// Up to 8 times as many keys lie in at most 8 splits; beyond, no split is shorter. Fewer KV heads need more splits to
// fill a machine, keys of half the bytes half as many.
QKV_HOST_DEVICE constexpr int long_split_keys(int num_kv_heads, int element_bytes) {
  const int keys_of_16_bits = num_kv_heads >= 8 ? 2048 : num_kv_heads >= 4 ? 1024 : 512;
  return keys_of_16_bits * 2 / element_bytes;
}

// Requests of no more keys are one split: many of them come at once, and each split costs a CTA's first and last
// instructions.
constexpr int kUncutKeys = 512;

// Keys of a split, on the absolute grid of its multiples. Up to 8 splits join within a cluster or by a ticket (the bits
// are the same), more by a ticket.
QKV_HOST_DEVICE constexpr int split_keys(const KeyValueShape& kv, int kv_len, int num_kv_heads, int tile_q) {
  constexpr int kGrain = 128;
  const int least = larger(least_split_keys(kv, tile_q), kv_len <= kUncutKeys ? kUncutKeys : 0);
  const int longest = larger(least, long_split_keys(num_kv_heads, kv.element_bytes));
  // Unsigned: shifts, where a compiler would else merge the two into a division by either.
  const unsigned last_key = larger(kv_len - 1, 0);
  if (kv_len > kMaxClusterSplits * longest) {
    return larger(longest, round_up(static_cast<int>(last_key / kMaxSplits) + 1, kGrain));
  }
  return larger(least, round_up(static_cast<int>(last_key / kMaxClusterSplits) + 1, kGrain));
}

// What split_keys comes to at most.
QKV_HOST_DEVICE constexpr SplitBounds split_bounds(int num_kv_heads, int element_bytes) {
  return {kMaxClusterSplits, long_split_keys(num_kv_heads, element_bytes), kMaxSplits};
}

// A CTA. Few items: each has an SM to itself, and the time of one item counts. Many: three or more share an SM, so that
// some load while others end.
struct LaunchShape {
  int num_warps;
  int num_stages;
  int min_ctas;
};

// Stages of a warp's ring. Tiles of 8 bits have half the bytes, so more of them are under way where CTAs share an SM:
// 192 KB, as of 16 bits.
QKV_HOST_DEVICE constexpr int num_stages(const KeyValueShape& kv, int tile_q, bool few_items, int warps_of_sm) {
  if (few_items || kv.element_bytes == 2) return (few_items ? warps_of_sm == 4 : tile_q > 16) ? 2 : 1;
  constexpr int kBytesUnderWay = 192 * 1024;
  constexpr int kMost = 4;
  const int stages = kBytesUnderWay / (warps_of_sm * tile_keys(kv, tile_q) * kv.token_bytes());
  return stages < 1 ? 1 : stages < kMost ? stages : kMost;
}

QKV_HOST_DEVICE constexpr int sm_bytes(const KeyValueShape& kv, int tile_q, const LaunchShape& launch) {
  return launch.min_ctas * (kReservedBytes + smem_layout(kv, tile_q, tile_keys(kv, tile_q), launch.num_warps,
                                                         launch.num_stages, kMaxClusterSplits, tile_q)
                                                 .total_bytes);
}

// Scales of tokens make a tile's chain of instructions longer: a fourth CTA fills its waits, but where the kernel's
// turns need registers (takes_turns).
QKV_HOST_DEVICE constexpr LaunchShape launch_shape(const KeyValueShape& kv, int tile_q, bool few_items,
                                                   bool takes_turns) {
  const int lanes = num_lanes(tile_q, kv.head_dim_v);
  LaunchShape launch = few_items ? LaunchShape{lanes, 1, 1} : LaunchShape{4, 1, 3};
  if (!few_items) {
    const int most_rows = kv.token_scales ? 8 : 16;
    if (tile_q > most_rows || kv.head_dim_v > 128 || kv.head_dim > 192) launch.min_ctas = 2;
    if (tile_q <= 8 && kv.head_dim <= 64 && kv.head_dim_v <= 64) launch.min_ctas = 5;
    if (tile_q <= 8 && kv.token_scales && launch.min_ctas == 3 && !takes_turns) launch.min_ctas = 4;
  }
  launch.num_stages = num_stages(kv, tile_q, few_items, launch.num_warps * launch.min_ctas);
  // Widening needs warps more than bytes under way.
  while (kv.element_bytes == 1 && launch.num_stages > 1 && sm_bytes(kv, tile_q, launch) > kSmemOfSm) {
    --launch.num_stages;
  }
  while (launch.min_ctas > 1 && sm_bytes(kv, tile_q, launch) > kSmemOfSm) --launch.min_ctas;
  while (launch.num_stages > 1 && sm_bytes(kv, tile_q, launch) > kSmemOfSm) --launch.num_stages;
  return launch;
}

// A CTA whose items hold the rows of several requests, max_rows of them, over keys that these have in common. Each
// request's rows keep the arithmetic that they have alone: tile_keys, num_lanes and chains of products are those of its
// own tile, request_tile_q. Rows fill the registers, so that an SM holds 8 warps: one CTA of 8 lanes, or two of 4.
QKV_HOST_DEVICE constexpr LaunchShape shared_launch_shape(const KeyValueShape& kv, int request_tile_q, bool few_items) {
  const int lanes = num_lanes(request_tile_q, kv.head_dim_v);
  LaunchShape launch{lanes, 2, lanes == 8 || few_items ? 1 : 2};
  const int tile_kv = tile_keys(kv, request_tile_q);
  const int bytes = kReservedBytes + smem_layout(kv, max_rows(kv.head_dim_v), tile_kv, launch.num_warps,
                                                 launch.num_stages, 1, request_tile_q)
                                         .total_bytes;
  if (launch.min_ctas * bytes > kSmemOfSm) launch.num_stages = 1;
  return launch;
}

}  // namespace qkv::index::few_rows
