// What we use of NCCL, declared by ourselves so that the library builds where no NCCL is installed. Types have NCCL's
// names, functions theirs without the prefix. Layouts and values are facts of NCCL 2: tests/parallel/nccl_api_test.cpp
// compares them with nccl.h where it is at hand.
#pragma once

#include <cstddef>

#include "jit/cuda_api.hpp"

struct ncclComm;

namespace qkv::parallel {

using ncclComm_t = ::ncclComm*;
using ncclResult_t = int;

inline constexpr ncclResult_t kNcclSuccess = 0;
inline constexpr ncclResult_t kNcclInProgress = 7;  // of communicators whose calls do not block

struct ncclUniqueId {
  char internal[128];
};

enum class ncclDataType_t : int { uint8 = 1, float32 = 7 };
enum class ncclRedOp_t : int { sum = 0 };

struct NcclFunctions {
  ncclResult_t (*get_version)(int* version);  // 10000·major + 100·minor + patch
  const char* (*get_error_string)(ncclResult_t);
  const char* (*get_last_error)(
      ncclComm_t);  // what went wrong in a thread's or a communicator's last call; may be empty

  ncclResult_t (*get_unique_id)(ncclUniqueId*);
  ncclResult_t (*comm_init_rank)(ncclComm_t*, int num_ranks, ncclUniqueId, int rank);
  ncclResult_t (*comm_destroy)(ncclComm_t);
  ncclResult_t (*comm_abort)(ncclComm_t);
  ncclResult_t (*comm_get_async_error)(ncclComm_t, ncclResult_t*);
  ncclResult_t (*comm_count)(ncclComm_t, int* num_ranks);
  ncclResult_t (*comm_user_rank)(ncclComm_t, int* rank);
  ncclResult_t (*comm_cu_device)(ncclComm_t, int* device);

  // Counts are of elements that one rank sends, or, of reduce_scatter, receives.
  ncclResult_t (*all_gather)(const void* send, void* receive, size_t count, ncclDataType_t, ncclComm_t, jit::CUstream);
  ncclResult_t (*reduce_scatter)(const void* send, void* receive, size_t count, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                                 jit::CUstream);
  ncclResult_t (*send)(const void* send, size_t count, ncclDataType_t, int to, ncclComm_t, jit::CUstream);
  ncclResult_t (*receive)(void* receive, size_t count, ncclDataType_t, int from, ncclComm_t, jit::CUstream);
  ncclResult_t (*group_start)();
  ncclResult_t (*group_end)();
};

}  // namespace qkv::parallel
