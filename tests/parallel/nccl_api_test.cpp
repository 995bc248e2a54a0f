// Our declarations of NCCL against NCCL's own, where its header is at hand.
#include "parallel/nccl_api.hpp"

#include <gtest/gtest.h>

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)

#include <nccl.h>

#include "support/same_call.hpp"

namespace qkv {
namespace {

using parallel::NcclFunctions;
using test::same_call;

static_assert(parallel::kNcclSuccess == ncclSuccess && parallel::kNcclInProgress == ncclInProgress);
static_assert(static_cast<int>(parallel::ncclDataType_t::uint8) == ncclUint8);
static_assert(static_cast<int>(parallel::ncclDataType_t::float32) == ncclFloat32);
static_assert(static_cast<int>(parallel::ncclRedOp_t::sum) == ncclSum);
static_assert(sizeof(parallel::ncclUniqueId) == sizeof(ncclUniqueId));

static_assert(same_call(&NcclFunctions::get_version, ncclGetVersion));
static_assert(same_call(&NcclFunctions::get_error_string, ncclGetErrorString));
static_assert(same_call(&NcclFunctions::get_last_error, ncclGetLastError));
static_assert(same_call(&NcclFunctions::get_unique_id, ncclGetUniqueId));
static_assert(same_call(&NcclFunctions::comm_init_rank, ncclCommInitRank));
static_assert(same_call(&NcclFunctions::comm_destroy, ncclCommDestroy));
static_assert(same_call(&NcclFunctions::comm_abort, ncclCommAbort));
static_assert(same_call(&NcclFunctions::comm_get_async_error, ncclCommGetAsyncError));
static_assert(same_call(&NcclFunctions::comm_count, ncclCommCount));
static_assert(same_call(&NcclFunctions::comm_user_rank, ncclCommUserRank));
static_assert(same_call(&NcclFunctions::comm_cu_device, ncclCommCuDevice));
static_assert(same_call(&NcclFunctions::all_gather, ncclAllGather));
static_assert(same_call(&NcclFunctions::reduce_scatter, ncclReduceScatter));
static_assert(same_call(&NcclFunctions::send, ncclSend));
static_assert(same_call(&NcclFunctions::receive, ncclRecv));
static_assert(same_call(&NcclFunctions::group_start, ncclGroupStart));
static_assert(same_call(&NcclFunctions::group_end, ncclGroupEnd));

TEST(NcclApi, agrees_with_nccls_header) { EXPECT_GE(NCCL_VERSION_CODE, 21300) << "checked by the compiler, above"; }

}  // namespace
}  // namespace qkv

#else

TEST(NcclApi, agrees_with_nccls_header) { GTEST_SKIP() << "nccl.h and cuda_runtime.h are not on the include path"; }

#endif
