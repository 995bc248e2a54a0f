// Random cases of MLA prefill for `qkv check --mla`: a case of plain attention whose keys and values are projections of
// latents, and how its context is chunked.
#pragma once

#include <optional>
#include <string>

#include "cases.hpp"
#include "qkv/mla_context_parallel.hpp"

namespace qkv::tools {

struct MlaCase {
  Case attention;  // a decoder layer without a cache, a key head a query head: what the whole must equal
  int32_t qk_rope_head_dim = 0;
  int32_t kv_lora_rank = 0;
  std::optional<DType> cache_dtype;  // of 8 bits, if given
  ContextChunkOptions options;
  bool with_ranks = false;                     // options.num_ranks share the cache
  std::optional<StateExchange> exchange = {};  // of states between them; not given: of latents

  MlaSpec spec() const;
};

// num_ranks: that share the cache; 0 = nobody does.
MlaCase draw_mla_case(uint64_t seed, int64_t index, DeviceKind device = DeviceKind::cpu, int32_t num_ranks = 0);
std::string describe(const MlaCase& c);

// Creates the layer and plans the batch: on a GPU, that compiles the kernels.
void prepare(const MlaCase& c, Device device);

// MlaPrefill::forward, or with ranks, as threads, MlaContextParallel::forward, agrees with the float64 oracle on
// unchunked attention, reads and writes nothing that is not its own, and with options.batch_invariant each request
// alone has the same bits. What is wrong, in one line, or nothing.
std::string failure_of(const MlaCase& c, Device device = {});

}  // namespace qkv::tools
