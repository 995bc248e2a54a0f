// NCCL, opened when first needed. docs/collectives.md tells users where it is looked for.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "jit/library.hpp"
#include "jit/nvrtc_library.hpp"
#include "parallel/nccl_api.hpp"

namespace qkv::parallel {

struct Nccl : NcclFunctions {
  std::string path;
  int version = 0;
};

// `named_file` (QKV_NCCL_LIBRARY): this file and no other. Throws unavailable: what was searched, what was found and
// not taken, and what to install.
Nccl open_nccl(const std::optional<std::string>& named_file, const std::vector<jit::SearchPlace>& places);
const Nccl& nccl();

// "2.28.3 at /usr/lib/libnccl.so.2". Never throws.
jit::Probe probe_nccl();

// "unhandled system error: no socket interface found". `communicator` may be null.
std::string error_text(const NcclFunctions& functions, ncclResult_t result, ncclComm_t communicator);

}  // namespace qkv::parallel
