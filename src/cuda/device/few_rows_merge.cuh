// How an item of the few-rows kernel ends: the states of its lanes are joined in the CTA, in the order of lanes; the
// CTA's state is the result, or is joined with those of the other splits, in the order of splits, through the shared
// memory of a cluster or through global memory and a ticket. Both ways run the same arithmetic on the same numbers.
#pragma once

#include "dtype_codes.cuh"
#include "few_rows_params.hpp"
#include "few_rows_tile.cuh"
#include "output_scale.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/float8.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "softmax.cuh"

namespace qkv::cuda::few_rows {

constexpr int kRowVectors = key::head_dim_v / 4;
constexpr int kStatePitch = shape::state_pitch(key::head_dim_v);

// What a CTA keeps from item to item. In shared memory: registers are scarce while an item runs.
struct CtaTurn {
  int index;      // of the item
  int num_items;  // of the launch
};
static_assert(sizeof(CtaTurn) <= shape::kTurnBytes);

__device__ __forceinline__ CtaTurn& turn_of(char* smem) { return *reinterpret_cast<CtaTurn*>(smem + kLayout.turn); }

// 4 elements of a row's mean, and the row's natural LSE.
struct State {
  float4 mean;
  float lse;
};

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& value) {
  sum.x = __fmaf_rn(factor, value.x, sum.x);
  sum.y = __fmaf_rn(factor, value.y, sum.y);
  sum.z = __fmaf_rn(factor, value.z, sum.z);
  sum.w = __fmaf_rn(factor, value.w, sum.w);
}

// weighted/total, or zeros where nothing was seen. The added 0 turns -0 into 0, so that tiles in which a row sees
// nothing can't be told from tiles that were skipped.
__device__ __forceinline__ float4 mean_of(const float4& weighted, float total) {
  const float factor = total == 0.0F ? 0.0F : __frcp_rn(total);
  return {__fmaf_rn(weighted.x, factor, 0.0F), __fmaf_rn(weighted.y, factor, 0.0F), __fmaf_rn(weighted.z, factor, 0.0F),
          __fmaf_rn(weighted.w, factor, 0.0F)};
}

// -infinity where total is 0: nothing was seen.
__device__ __forceinline__ float natural_lse(float max_log2, float total) {
  return total == 0.0F ? negative_infinity() : (max_log2 + log2_approx(total)) * kLn2;
}

// Joins states in rising order of `s`. An infinite maximum or a NaN gives NaN; an empty state adds nothing.
template <typename LseOf, typename MeanOf>
__device__ __forceinline__ State join_states(int num_states, LseOf lse_of, MeanOf mean_of_state) {
  float max = negative_infinity();
  for (int s = 0; s < num_states; ++s) max = fmaxf(max, lse_of(s));
  const float base = max == negative_infinity() ? 0.0F : max;
  float total = 0.0F;
  float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 8
  for (int s = 0; s < num_states; ++s) {
    const float weight = exp2_approx((lse_of(s) - base) * kLog2e);
    total += weight;
    add_scaled(sum, weight, mean_of_state(s));
  }
  return {mean_of(sum, total), natural_lse(max * kLog2e, total)};
}

// The same for as many states as a cluster holds: the same bits, with no step waiting for a loop.
template <typename LseOf, typename MeanOf>
__device__ __forceinline__ State join_cluster_states(int num_states, LseOf lse_of, MeanOf mean_of_state) {
  float weight[key::cluster_size];
  float max = negative_infinity();
#pragma unroll
  for (int s = 0; s < key::cluster_size; ++s) {
    weight[s] = s < num_states ? lse_of(s) : negative_infinity();
    max = fmaxf(max, weight[s]);
  }
  const float base = max == negative_infinity() ? 0.0F : max;
  float total = 0.0F;
  float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
  for (int s = 0; s < key::cluster_size; ++s) {
    if (s < num_states) {
      weight[s] = exp2_approx((weight[s] - base) * kLog2e);
      total += weight[s];
      add_scaled(sum, weight[s], mean_of_state(s));
    }
  }
  return {mean_of(sum, total), natural_lse(max * kLog2e, total)};
}

// The sink takes part in the sum and brings no value.
__device__ __forceinline__ void join_sink(State& state, float sink) {
  const float max = fmaxf(state.lse, sink);
  if (max == negative_infinity()) return;  // also the sum of nothing
  const float weight = exp2_approx((state.lse - max) * kLog2e);
  const float total = weight + exp2_approx((sink - max) * kLog2e);
  const float factor = __fdividef(weight, total);
  state.mean = {state.mean.x * factor, state.mean.y * factor, state.mean.z * factor, state.mean.w * factor};
  state.lse = natural_lse(max * kLog2e, total);
}

// What 4 elements of a row of 8 bits are divided by: vector `vector` of the row. A group's lanes all call this.
__device__ __forceinline__ float scale_of(const OutputScaleLayout& scale, long long token, int head, int vector,
                                          const float4& mean) {
  if constexpr (!is_float8(key::out_dtype)) return 1.0F;
  if constexpr (!key::group_scales) return *scale.data;
  const float largest = fmaxf(fmaxf(finite_magnitude(mean.x), finite_magnitude(mean.y)),
                              fmaxf(finite_magnitude(mean.z), finite_magnitude(mean.w)));
  const float chosen = choose_scale<kKeyValue.share_vectors>(largest, key::out_dtype);
  constexpr int kGroupVectors = index::kScaleGroup / 4;
  if (vector % kGroupVectors == 0)
    scales_of_row(scale, token, head)[vector / kGroupVectors * scale.group_stride] = chosen;
  return chosen;
}

// 4 elements of a row as out_dtype; 8-bit ones in units of `scale`.
__device__ __forceinline__ void store_mean(void* out, long long element, const float4& mean, float scale) {
  if constexpr (key::out_dtype == kF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + element) = mean;
  } else if constexpr (is_float8(key::out_dtype)) {
    constexpr bool kOutE4M3 = key::out_dtype == kF8E4M3;
    const unsigned low = ptx::pack_float8<kOutE4M3>(__fdiv_rn(mean.x, scale), __fdiv_rn(mean.y, scale));
    const unsigned high = ptx::pack_float8<kOutE4M3>(__fdiv_rn(mean.z, scale), __fdiv_rn(mean.w, scale));
    *reinterpret_cast<unsigned*>(static_cast<char*>(out) + element) = low | high << 16;
  } else {
    constexpr bool kOutBf16 = key::out_dtype == kBf16;
    const uint2 packed = {ptx::pack_16<kOutBf16>(mean.x, mean.y), ptx::pack_16<kOutBf16>(mean.z, mean.w)};
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(out) + element) = packed;
  }
}

// A lane's state: [tile_q][kStatePitch] weighted sums, then max and sum of each row. The last lane of each warp finds
// its warp's ring empty.
__device__ __forceinline__ float* lane_state(char* smem, int key_lane) {
  constexpr int kEarlier = kNumLanes - key::num_warps;
  const int offset = key_lane < kEarlier ? kLayout.states + key_lane * kLayout.state_bytes
                                         : (key_lane - kEarlier) * kLayout.warp_bytes;
  return reinterpret_cast<float*>(smem + offset);
}

// One item's end. Vectors are 4 elements of a row; vector v = row·kRowVectors + d/4.
class ItemEnd {
 public:
  // tokens: of shared rows. value_scale: of all values of the item, 1 where they have none in common.
  __device__ __forceinline__ ItemEnd(const FewRowsParams& params, const FewRowsItem& item, const SharedToken* tokens,
                                     char* smem, float value_scale)
      : params_(params),
        item_(item),
        tokens_(tokens),
        smem_(smem),
        value_scale_(value_scale),
        rows_((item.query_end - item.query_begin) * key::group_size) {}

  // After a barrier behind the last store of a lane's state.
  __device__ __forceinline__ void run() {
    if constexpr (kSharedRows) {
      for_each_vector([&](int v) { store_state(v, join_lanes(v)); });
      join_runs_by_tickets();
      return;
    }
    if (item_.num_splits == 1) {
      for_each_vector([&](int v) { finish(v, join_lanes(v)); });
      return;
    }
    if constexpr (key::cluster_size > 1) {
      if (item_.num_splits > 1 && item_.ticket < 0) return join_in_cluster();
    }
    for_each_vector([&](int v) { store_state(v, join_lanes(v)); });
    if (item_.num_splits > 1) join_by_ticket();
  }

 private:
  template <typename Action>
  __device__ __forceinline__ void for_each_vector(Action action) const {
    for (int v = threadIdx.x; v < rows_ * kRowVectors; v += kThreads) action(v);
  }

  __device__ __forceinline__ const float* state_of(int key_lane) const { return lane_state(smem_, key_lane); }

  __device__ __forceinline__ State join_lanes(int v) const {
    const int row = v / kRowVectors;
    const int place = row * kStatePitch + v % kRowVectors * 4;
    const int stats = key::tile_q * kStatePitch + 2 * row;
    float2 max_and_sum[kNumLanes];
    float max = negative_infinity();
#pragma unroll
    for (int i = 0; i < kNumLanes; ++i) {
      max_and_sum[i] = *reinterpret_cast<const float2*>(state_of(i) + stats);
      max = fmaxf(max, max_and_sum[i].x);
    }
    const float base = max == negative_infinity() ? 0.0F : max;
    float total = 0.0F;
    float4 sum = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int i = 0; i < kNumLanes; ++i) {
      const float weight = exp2_approx(max_and_sum[i].x - base);
      total = __fmaf_rn(weight, max_and_sum[i].y, total);
      add_scaled(sum, weight, *reinterpret_cast<const float4*>(state_of(i) + place));
    }
    State state = {mean_of(sum, total), natural_lse(max, total)};
    if constexpr (kIs8Bit && !key::token_scales) {
      state.mean = {state.mean.x * value_scale_, state.mean.y * value_scale_, state.mean.z * value_scale_,
                    state.mean.w * value_scale_};
    }
    return state;
  }

  __device__ __forceinline__ void finish(int v, State state) const {
    const ForwardParams& params = params_.forward;
    const int row = v / kRowVectors;
    const int d = v % kRowVectors * 4;
    const int head = item_.kv_head * key::group_size + row % key::group_size;
    const long long token = item_.query_token + row / key::group_size;
    if (params.sinks != nullptr) join_sink(state, params.sinks[head]);
    const float scale = scale_of(params.out_scale, token, head, v % kRowVectors, state.mean);
    store_mean(params.out, token * params.out_token_stride + head * params.out_head_stride + d, state.mean, scale);
    if (d == 0 && params.lse != nullptr) {
      params.lse[head * params.lse_head_stride + token * params.lse_token_stride] = state.lse;
    }
  }

  __device__ __forceinline__ void store_state(int v, const State& state) const {
    long long row = static_cast<long long>(item_.state_row) + v / kRowVectors;
    if constexpr (kSharedRows) {
      const int own_row = v / kRowVectors;
      row = static_cast<long long>(tokens_[own_row / key::group_size].state_row) + own_row % key::group_size;
    }
    const int d = v % kRowVectors * 4;
    *reinterpret_cast<float4*>(params_.forward.state_out + row * key::head_dim_v + d) = state.mean;
    if (d == 0) params_.forward.state_lse[row] = state.lse;
  }

  // The last CTA to arrive joins. It sees the others' states: each stored, met at a barrier, and released by the
  // ticket.
  __device__ __forceinline__ void join_by_ticket() const {
    int* is_last = reinterpret_cast<int*>(smem_ + kLayout.flag);
    __syncthreads();
    if (threadIdx.x == 0) *is_last = is_last_to_arrive(item_.ticket, item_.num_splits);
    __syncthreads();
    if (*is_last) join_stored_states();
  }

  __device__ __forceinline__ bool is_last_to_arrive(int ticket, int num_splits) const {
    int* arrivals = params_.tickets + ticket;
    const bool is_last = ptx::atomic_add_acq_rel(arrivals, 1) == num_splits - 1;
    if (is_last) *arrivals = 0;
    return is_last;
  }

  // The same for each request of shared rows: a thread each draws the tickets, then the CTA joins what it has to.
  __device__ __forceinline__ void join_runs_by_tickets() const {
    unsigned* last_of = reinterpret_cast<unsigned*>(smem_ + kLayout.flag);  // bit t: of the run that begins at token t
    const int num_tokens = item_.query_end - item_.query_begin;
    __syncthreads();
    if (threadIdx.x < shape::kWarpSize) {
      const int t = threadIdx.x;
      bool is_last = false;
      if (t < num_tokens && tokens_[t].run_tokens > 0) {
        is_last = is_last_to_arrive(tokens_[t].ticket, tokens_[t].num_splits);
      }
      const unsigned bits = __ballot_sync(0xffffffff, is_last);
      if (t == 0) *last_of = bits;
    }
    __syncthreads();
#pragma unroll 1
    for (unsigned rest = *last_of; rest != 0; rest &= rest - 1) {
      const SharedToken& first = tokens_[__ffs(rest) - 1];
      FewRowsItem run = item_;
      run.query_begin = 0;
      run.query_end = first.run_tokens;
      run.query_token = first.token;
      run.state_row = first.state_row;
      run.split = first.split;
      run.num_splits = first.num_splits;
      ItemEnd(params_, run, nullptr, smem_, value_scale_).join_stored_states();
      __syncthreads();  // the next run's LSEs lie where this one's did
    }
  }

  // All states of these rows, which lie one after another.
  __device__ __forceinline__ void join_stored_states() const {
    const long long first_row = static_cast<long long>(item_.state_row) - item_.split * rows_;
    float* lse = reinterpret_cast<float*>(smem_);  // [num_splits, rows], over what the lanes left
    for (int i = threadIdx.x; i < item_.num_splits * rows_; i += kThreads) {
      lse[i] = __ldcg(params_.forward.state_lse + first_row + i);
    }
    __syncthreads();
    for_each_vector([&](int v) {
      const int row = v / kRowVectors;
      const float* first = params_.forward.state_out + first_row * key::head_dim_v + 4LL * v;
      finish(v, join_states(
                    item_.num_splits, [&](int s) { return lse[s * rows_ + row]; },
                    [&](int s) {
                      return __ldcg(reinterpret_cast<const float4*>(first + 1LL * s * rows_ * key::head_dim_v));
                    }));
    });
  }

  // Each of the n CTAs joins one share of the vectors: every CTA sends every other its part of that share.
  __device__ __forceinline__ void join_in_cluster() const {
    const int n = item_.num_splits;
    const int vectors = rows_ * kRowVectors;
    const int share = shape::round_up((vectors + n - 1) / n, kKeyValue.share_vectors);
    const unsigned smem = ptx::shared_address(smem_);
    const unsigned barrier = smem + kReceivedBarrier;
    const unsigned first_rank = ptx::cluster_rank() - item_.split;
    const int own_begin = item_.split * share;
    const int own_count = min(share, vectors - own_begin);
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_bytes(barrier, n * (max(own_count, 0) * 16 + rows_ * 4));
    }
    const float shares = __frcp_rn(static_cast<float>(share));
    for_each_vector([&](int v) {
      const State state = join_lanes(v);
      const int owner = static_cast<int>((v + 0.5F) * shares);  // v/share: exact below 2^20
      const unsigned place = smem + kLayout.received + (item_.split * share + v - owner * share) * 16;
      ptx::store_async(ptx::shared_address_of_rank(place, first_rank + owner), state.mean,
                       ptx::shared_address_of_rank(barrier, first_rank + owner));
      // All threads of a row know its LSE; each sends it to another CTA.
      const unsigned lse = smem + kLayout.received_lse + (item_.split * key::tile_q + v / kRowVectors) * 4;
      for (int rank = v % kRowVectors; rank < n; rank += kRowVectors) {
        ptx::store_async(ptx::shared_address_of_rank(lse, first_rank + rank), state.lse,
                         ptx::shared_address_of_rank(barrier, first_rank + rank));
      }
    });

    ptx::mbarrier_wait_cluster(barrier, 0);
    const float4* received = reinterpret_cast<const float4*>(smem_ + kLayout.received);
    const float* lse = reinterpret_cast<const float*>(smem_ + kLayout.received_lse);
    for (int i = threadIdx.x; i < own_count; i += kThreads) {
      const int row = (own_begin + i) / kRowVectors;
      finish(own_begin + i,
             join_cluster_states(
                 n, [&](int s) { return lse[s * key::tile_q + row]; }, [&](int s) { return received[s * share + i]; }));
    }
  }

  const FewRowsParams& params_;
  const FewRowsItem& item_;
  const SharedToken* tokens_;  // of the item, where its rows are shared
  char* smem_;
  const float value_scale_;
  const int rows_;
};

}  // namespace qkv::cuda::few_rows
