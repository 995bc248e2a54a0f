#include "api/rank_agreement.hpp"

#include <xxhash.h>

#include <bit>
#include <string>
#include <vector>

#include "core/checks.hpp"
#include "qkv/cuda.hpp"
#include "qkv/device.hpp"

namespace qkv::api {
namespace {

// A number that must be the same everywhere; is_hash: two of them say no more than that they differ.
struct Fact {
  const char* name;
  int64_t value;
  bool is_hash = false;
};

int64_t hash_of(const void* data, size_t bytes) { return static_cast<int64_t>(XXH3_64bits(data, bytes)); }
int64_t hash_of(const std::vector<float>& values) { return hash_of(values.data(), values.size() * sizeof(float)); }

Fact version_fact() {
  const std::string library = version();
  return {"qkv's version", hash_of(library.data(), library.size()), true};
}

std::vector<Fact> facts_of(const ContextParallelSpec& spec) {
  const LayerSpec& layer = spec.layer;
  return {
      version_fact(),
      {"interleave_size", spec.interleave_size},
      {"exchange", static_cast<int64_t>(spec.exchange)},
      {"layer.num_q_heads", layer.num_q_heads},
      {"layer.num_kv_heads", layer.num_kv_heads},
      {"layer.head_dim", layer.head_dim},
      {"layer.head_dim_v", layer.value_dim()},
      {"layer.query_dtype", static_cast<int64_t>(layer.query_dtype)},
      {"layer.kv_dtype", static_cast<int64_t>(layer.kv_dtype)},
      {"layer.output_dtype", static_cast<int64_t>(layer.out_dtype())},
      {"layer.output_scales", static_cast<int64_t>(layer.output_scales)},
      {"layer.type", static_cast<int64_t>(layer.type)},
      {"layer.cache.page_size", layer.cache ? layer.cache->page_size : 0},
      {"layer.kv_scales", static_cast<int64_t>(layer.kv_scales)},
      {"layer.mask", static_cast<int64_t>(layer.effective_mask().hash()), true},
      {"layer.scale", std::bit_cast<int32_t>(layer.scale.value_or(0)), true},
      {"layer.softcap", std::bit_cast<int32_t>(layer.softcap), true},
      {"layer.alibi_slopes", hash_of(layer.alibi_slopes), true},
      {"layer.alibi_per_request", layer.alibi_per_request ? 1 : 0},
      {"layer.sinks", hash_of(layer.sinks), true},
  };
}

std::vector<Fact> facts_of(const MlaContextParallelSpec& spec) {
  const MlaSpec& layer = spec.layer;
  return {
      version_fact(),
      {"interleave_size", spec.interleave_size},
      {"exchange", static_cast<int64_t>(spec.exchange)},
      {"layer.num_heads", layer.num_heads},
      {"layer.qk_nope_head_dim", layer.qk_nope_head_dim},
      {"layer.qk_rope_head_dim", layer.qk_rope_head_dim},
      {"layer.v_head_dim", layer.v_head_dim},
      {"layer.kv_lora_rank", layer.kv_lora_rank},
      {"layer.dtype", static_cast<int64_t>(layer.dtype)},
      {"layer.output_dtype", static_cast<int64_t>(layer.out_dtype())},
      {"layer.output_scales", static_cast<int64_t>(layer.output_scales)},
      {"layer.cache_dtype", static_cast<int64_t>(layer.latent_dtype())},
      {"layer.cache.page_size", layer.cache.page_size},
      {"layer.mask", static_cast<int64_t>(layer.mask.value_or(mask::causal()).hash()), true},
      {"layer.scale", std::bit_cast<int32_t>(layer.scale.value_or(0)), true},
      {"layer.softcap", std::bit_cast<int32_t>(layer.softcap), true},
      {"layer.sinks", hash_of(layer.sinks), true},
  };
}

// [num_ranks, values of a rank]
std::vector<int64_t> all_values(const std::vector<int64_t>& own, Collectives& collectives) {
  const auto count = static_cast<int64_t>(own.size());
  std::vector<int64_t> all(collectives.num_ranks() * own.size());
  const Device device = collectives.device();
  const auto exchange = [&](const void* send, void* receive) {
    collectives.all_gather(Tensor::contiguous(send, DType::i64, {count}, device),
                           Tensor::contiguous(receive, DType::i64, {collectives.num_ranks(), count}, device));
  };
  if (device.kind == DeviceKind::cpu) {
    exchange(own.data(), all.data());
    return all;
  }
  const DeviceMemory send(device, count * static_cast<int64_t>(sizeof(int64_t)));
  const DeviceMemory receive(device, static_cast<int64_t>(all.size() * sizeof(int64_t)));
  send.copy_from_host(own.data());
  exchange(send.data(), receive.data());
  receive.copy_to_host(all.data());
  return all;
}

void check_alike(const std::vector<Fact>& facts, Collectives& collectives) {
  std::vector<int64_t> own;
  own.reserve(facts.size());
  for (const Fact& fact : facts) own.push_back(fact.value);
  const std::vector<int64_t> all = all_values(own, collectives);
  for (size_t i = 0; i < facts.size(); ++i) {
    for (int32_t rank = 1; rank < collectives.num_ranks(); ++rank) {
      const int64_t value = all[rank * facts.size() + i];
      if (value == all[i]) continue;
      refuse(facts[i].name,
             facts[i].is_hash ? fmt::format("another one on rank {}", rank) : fmt::format("{} on rank {}", value, rank),
             facts[i].is_hash ? "the same on all ranks" : fmt::format("{}, as on rank 0", all[i]), ErrorCode::mismatch);
    }
  }
}

template <class Spec>
Shard shard_of(const Spec& spec, Collectives* collectives) {
  if (collectives == nullptr) refuse("collectives", "nothing", "in_process_ranks, mpi_ranks, nccl_ranks or your own");
  check_alike(facts_of(spec), *collectives);
  return {collectives->rank(), collectives->num_ranks(), spec.interleave_size};
}

}  // namespace

Shard agreed_shard(const ContextParallelSpec& spec, Collectives* collectives) { return shard_of(spec, collectives); }

Shard agreed_shard(const MlaContextParallelSpec& spec, Collectives* collectives) { return shard_of(spec, collectives); }

}  // namespace qkv::api
