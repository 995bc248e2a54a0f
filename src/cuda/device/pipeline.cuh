// Shared memory of the many-rows kernel and the protocol between its warps.
//   query_full, key_full, value_full   one arrival (the loader's, with the bytes it expects), or where warps write keys
//                                      and values, one of each of them
//   query_free, key_free, value_free   one arrival a consumer warp
// In a stage's (or slot's) n-th use, consumers wait for "full" with parity n & 1, loaders for "free" with the other
// parity. What travels with a barrier (Step with key_full, ItemRecord with query_full) is written before the loader's
// arrival and read after the consumers' wait.
#pragma once

#include "core/index/forward_sm90_many_rows_shape.hpp"
#include "params.hpp"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"

namespace qkv::cuda {

// One step of the stream: a run of up to tile_kv keys for the query rows of an item.
struct Step {
  int kv_begin;
  unsigned bits;  // keys that count (kStepKeys), and flags
};
constexpr unsigned kStepKeys = 0xFF;
constexpr unsigned kStepPartial = 1u << 8;  // some row of the item does not see some key
constexpr unsigned kStepFirst = 1u << 9;    // of its item
constexpr unsigned kStepLast = 1u << 10;    // of its item
constexpr unsigned kStepFinal = 1u << 11;   // of the CTA's stream
constexpr unsigned kStepHides = 1u << 16;   // << consumer: of its rows, some do not see all keys of a whole step

// An item, what its request adds, and where its row 0 goes. Words 0 to 7 are written lane by lane.
struct ItemRecord {
  WorkItem item;
  int token_begin;  // of the request
  int q_len;
  int kv_len;
  int num_rows;
  long long out_offset;  // in ForwardParams::out, or in state_out
  long long lse_offset;  // in lse, or in state_lse
};
constexpr int kRecordTokenBegin = 8, kRecordQLen = 9, kRecordKvLen = 10;

// A record is read until its item's rows are stored. The loader writes the fourth after it later than that.
constexpr int kItemRecords = 4;

struct Control {
  unsigned long long query_full[2], query_free[2];
  unsigned long long key_full[2], key_free[2];
  unsigned long long value_full[2], value_free[2];
  Step steps[2];  // by key stage
  ItemRecord records[kItemRecords];
  bool not_finite[12];  // by consumer warp: it has stored such an output
};
static_assert(sizeof(ItemRecord) == 64 && sizeof(Control) <= index::kManyRowsControlBytes);

// Named barriers; 0 is __syncthreads.
constexpr int kBarrierTurn = 1;       // + consumer: its turn to issue products
constexpr int kBarrierWarpgroup = 5;  // + consumer: its own threads

__device__ __forceinline__ unsigned shared_address_of(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_control(Control* control, int consumers, int key_arrivals = 1,
                                             int value_arrivals = 1) {
  for (bool& flag : control->not_finite) flag = false;
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(shared_address_of(&control->query_full[i]), 1);
    ptx::mbarrier_init(shared_address_of(&control->query_free[i]), 4 * consumers);
    ptx::mbarrier_init(shared_address_of(&control->key_full[i]), key_arrivals);
    ptx::mbarrier_init(shared_address_of(&control->key_free[i]), 4 * consumers);
    ptx::mbarrier_init(shared_address_of(&control->value_full[i]), value_arrivals);
    ptx::mbarrier_init(shared_address_of(&control->value_free[i]), 4 * consumers);
  }
  ptx::fence_mbarrier_init();
}

// The stage (or slot) and the parity of the n-th use.
template <int kStages>
struct Ring {
  int uses = 0;
  __device__ __forceinline__ int stage() const { return uses % kStages; }
  __device__ __forceinline__ int phase() const { return uses / kStages & 1; }
  __device__ __forceinline__ void advance() { ++uses; }
};

}  // namespace qkv::cuda
