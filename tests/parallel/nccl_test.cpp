// What NCCL is asked, by a library that stands for it: no GPU is needed.
#include <gmock/gmock.h>

#include "parallel/nccl_rank.hpp"
#include "qkv/status.hpp"

namespace qkv {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const Device kGpu = {DeviceKind::cuda, 0};
void* const kSend = reinterpret_cast<void*>(0x10000);
void* const kReceive = reinterpret_cast<void*>(0x20000);
const Stream kStream = {reinterpret_cast<void*>(0x30)};

Tensor at(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(data, dtype, shape, kGpu);
}

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    return error.what();
  }
  return "nothing was thrown";
}

// Rank 1 of 3.
class NcclRanks : public testing::Test {
 protected:
  NcclRanks() : nccl_(parallel::open_nccl(QKV_FAKE_NCCL, {})) {
    std::string reason;
    const auto library = jit::open_library(QKV_FAKE_NCCL, reason);
    EXPECT_TRUE(jit::find_function(*library, "fake_nccl_calls", calls_));
    EXPECT_TRUE(jit::find_function(*library, "fake_nccl_fail", fail_after_));
    EXPECT_TRUE(jit::find_function(*library, "fake_nccl_set_async_error", set_async_error_));
    EXPECT_TRUE(jit::find_function(*library, "fake_nccl_reset", reset_));
    reset_();
  }

  std::shared_ptr<Collectives> make(bool is_owned = true) {
    parallel::ncclComm_t communicator = nullptr;
    nccl_.comm_init_rank(&communicator, 3, {}, 1);
    reset_();
    return parallel::nccl_rank(nccl_, communicator, 0, is_owned);
  }

  const parallel::Nccl nccl_;
  const char* (*calls_)() = nullptr;
  void (*fail_after_)(int successes, int result) = nullptr;
  void (*set_async_error_)(int result) = nullptr;
  void (*reset_)() = nullptr;
};

TEST_F(NcclRanks, know_their_numbers_and_device) {
  const auto ranks = make();
  EXPECT_EQ(ranks->rank(), 1);
  EXPECT_EQ(ranks->num_ranks(), 3);
  EXPECT_EQ(ranks->device(), kGpu);
}

TEST_F(NcclRanks, all_gather_is_of_bytes_on_the_stream) {
  const auto ranks = make();
  ranks->all_gather(at(kSend, DType::bf16, {2, 5}), at(kReceive, DType::bf16, {3, 2, 5}), kStream);
  EXPECT_STREQ(calls_(), "all_gather 0x10000 0x20000, 20 of type 1 on 0x30\n");
}

TEST_F(NcclRanks, reduce_scatter_is_a_sum_of_floats) {
  const auto ranks = make();
  ranks->reduce_scatter(at(kSend, DType::f32, {3, 10}), at(kReceive, DType::f32, {10}), kStream);
  EXPECT_STREQ(calls_(), "reduce_scatter 0x10000 0x20000, 10 of type 7 by 0 on 0x30\n");
}

TEST_F(NcclRanks, all_to_all_is_one_group_of_a_row_to_and_from_each_rank) {
  const auto ranks = make();
  ranks->all_to_all(at(kSend, DType::i32, {3, 64}), at(kReceive, DType::i32, {3, 64}), kStream);
  EXPECT_STREQ(calls_(),
               "group\n"
               "send 0x10000, 256 of type 1 to 0 on 0x30\n"
               "receive 0x20000, 256 of type 1 from 0 on 0x30\n"
               "send 0x10100, 256 of type 1 to 1 on 0x30\n"
               "receive 0x20100, 256 of type 1 from 1 on 0x30\n"
               "send 0x10200, 256 of type 1 to 2 on 0x30\n"
               "receive 0x20200, 256 of type 1 from 2 on 0x30\n"
               "end of group\n");
}

TEST_F(NcclRanks, empty_tensors_are_not_handed_over) {
  const auto ranks = make();
  ranks->all_to_all(at(kSend, DType::i32, {3, 0}), at(kReceive, DType::i32, {3, 0}), kStream);
  EXPECT_STREQ(calls_(), "");
}

TEST_F(NcclRanks, failure_has_nccls_words_and_every_later_call_fails_with_it) {
  const auto ranks = make();
  const auto gather = [&] { ranks->all_gather(at(kSend, DType::f16, {8}), at(kReceive, DType::f16, {3, 8}), kStream); };
  fail_after_(0, 2);
  EXPECT_THAT(message_of(gather),
              HasSubstr("ncclAllGather: got unhandled system error: socket closed by rank 2; allowed: ncclSuccess"));
  reset_();
  EXPECT_THAT(message_of(gather), HasSubstr("all_gather: got unhandled system error: socket closed by rank 2"));
  EXPECT_THAT(message_of([&] { ranks->check(); }), HasSubstr("check: got unhandled system error"));
  EXPECT_STREQ(calls_(), "") << "a broken communicator is not asked again";
}

TEST_F(NcclRanks, group_is_ended_where_a_send_fails) {
  const auto ranks = make();
  fail_after_(3, 6);  // the group, rank 0's send and receive
  EXPECT_THAT(message_of([&] {
                ranks->all_to_all(at(kSend, DType::f16, {3, 8}), at(kReceive, DType::f16, {3, 8}), kStream);
              }),
              HasSubstr("ncclSend and ncclRecv: got remote process exited: socket closed by rank 2"));
  EXPECT_THAT(calls_(), AllOf(HasSubstr("end of group"), testing::Not(HasSubstr("from 1"))));
}

TEST_F(NcclRanks, check_tells_what_failed_on_the_stream) {
  const auto ranks = make();
  EXPECT_NO_THROW(ranks->check());
  set_async_error_(6);
  EXPECT_THAT(message_of([&] { ranks->check(); }), HasSubstr("check: got remote process exited"));
}

TEST_F(NcclRanks, own_communicator_is_destroyed_or_after_a_failure_aborted) {
  make().reset();
  EXPECT_STREQ(calls_(), "destroy\n");
  auto ranks = make();
  set_async_error_(6);
  EXPECT_THROW(ranks->check(), Error);
  ranks.reset();
  EXPECT_STREQ(calls_(), "abort\n");
}

TEST_F(NcclRanks, communicator_of_the_caller_is_left_alone) {
  make(false).reset();
  EXPECT_STREQ(calls_(), "");
}

TEST_F(NcclRanks, communicator_of_another_device_is_refused) {
  parallel::ncclComm_t communicator = nullptr;
  nccl_.comm_init_rank(&communicator, 3, {}, 1);
  try {
    parallel::nccl_rank(nccl_, communicator, 5, false);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "device_index: got 5; allowed: 0, the communicator's");
  }
}

TEST(NcclLibrary, named_file_is_the_only_one_looked_for) {
  EXPECT_THAT(message_of([] {
                parallel::open_nccl("/nowhere/libnccl.so.2", {{"", "the loader's search"}});
              }),
              AllOf(HasSubstr("QKV_NCCL_LIBRARY: got no library that can be used (/nowhere/libnccl.so.2: not found)"),
                    HasSubstr("NCCL 2.13.0 or later: pip install nvidia-nccl-cu13")));
}

TEST(NcclLibrary, old_one_is_refused_by_version) {
  EXPECT_THAT(message_of([] { parallel::open_nccl(QKV_OLD_NCCL, {}); }),
              HasSubstr("old_nccl.so: version 2.12.7 is too old"));
}

TEST(NcclLibrary, one_without_a_function_is_refused_by_its_name) {
  EXPECT_THAT(message_of([] { parallel::open_nccl(QKV_NCCL_WITHOUT_SEND, {}); }), HasSubstr("has no ncclSend"));
}

TEST(NcclLibrary, missing_one_is_an_error_that_says_what_to_install) {
  EXPECT_THAT(message_of([] {
                parallel::open_nccl({}, {{"/nowhere", "a folder"}});
              }),
              HasSubstr("libnccl: got no library that can be used"));
}

// Refused before the library is looked for, so on every machine.
TEST(NcclLibrary, makers_refuse_ranks_out_of_range) {
  EXPECT_THROW(nccl_ranks(NcclUniqueId{}, 0, 0, 0), Error);
  EXPECT_THROW(nccl_ranks(NcclUniqueId{}, 2, 2, 0), Error);
}

}  // namespace
}  // namespace qkv
