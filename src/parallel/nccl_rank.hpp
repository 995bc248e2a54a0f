// A rank of an NCCL communicator, apart from how the library and the communicator are come by.
#pragma once

#include <memory>

#include "parallel/nccl_library.hpp"
#include "qkv/collectives.hpp"

namespace qkv::parallel {

// An owned communicator is destroyed with the object; aborted, if something has failed.
std::shared_ptr<Collectives> nccl_rank(const Nccl& nccl, ncclComm_t communicator, int32_t device_index, bool is_owned);

}  // namespace qkv::parallel
