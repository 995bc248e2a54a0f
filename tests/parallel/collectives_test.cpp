// What is refused before anything is exchanged, and what an engine of the caller's own is handed.
#include "qkv/collectives.hpp"

#include <gmock/gmock.h>

#include "qkv/status.hpp"

namespace qkv {
namespace {

using testing::HasSubstr;

// Rank 1 of 3, written by a user of the library: it keeps what it is asked.
class Recorder : public Collectives {
 public:
  explicit Recorder(Device device = {}) : Collectives(1, 3, device) {}

  struct Call {
    std::string operation;
    const void* send;
    const void* receive;
    int64_t count;
    void* stream;
    bool operator==(const Call&) const = default;
  };
  std::vector<Call> calls;

 protected:
  void all_gather_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    calls.push_back({"all_gather", send, receive, row_bytes, stream.handle});
  }
  void reduce_scatter_rows(const float* send, float* receive, int64_t row_elements, Stream stream) override {
    calls.push_back({"reduce_scatter", send, receive, row_elements, stream.handle});
  }
  void all_to_all_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    calls.push_back({"all_to_all", send, receive, row_bytes, stream.handle});
  }
};

// Addresses only: nothing reads them.
void* const kSend = reinterpret_cast<void*>(0x10000);
void* const kReceive = reinterpret_cast<void*>(0x20000);
const Device kGpu = {DeviceKind::cuda, 2};

Tensor at(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {}) {
  return Tensor::contiguous(data, dtype, shape, device);
}

template <class Call>
std::string refusal(Call call) {
  Recorder ranks;
  try {
    call(ranks);
  } catch (const Error& error) {
    EXPECT_TRUE(ranks.calls.empty());
    return error.what();
  }
  return "nothing was refused";
}

TEST(Collectives, engine_is_handed_rows_of_ranks) {
  Recorder ranks(kGpu);
  void* const stream = reinterpret_cast<void*>(0x30);
  ranks.all_gather(at(kSend, DType::f8e4m3, {2, 5}, kGpu), at(kReceive, DType::f8e4m3, {3, 2, 5}, kGpu), {stream});
  ranks.reduce_scatter(at(kSend, DType::f32, {3, 2, 5}, kGpu), at(kReceive, DType::f32, {2, 5}, kGpu), {stream});
  ranks.all_to_all(at(kSend, DType::i64, {3, 7}, kGpu), at(kReceive, DType::i64, {3, 7}, kGpu), {stream});
  EXPECT_THAT(ranks.calls, testing::ElementsAre(Recorder::Call{"all_gather", kSend, kReceive, 10, stream},
                                                Recorder::Call{"reduce_scatter", kSend, kReceive, 10, stream},
                                                Recorder::Call{"all_to_all", kSend, kReceive, 56, stream}));
}

TEST(Collectives, empty_tensors_are_nothing_to_exchange) {
  Recorder ranks;
  ranks.all_gather(at(nullptr, DType::f16, {0, 5}), at(nullptr, DType::f16, {3, 0, 5}));
  ranks.reduce_scatter(at(nullptr, DType::f32, {3, 0}), at(nullptr, DType::f32, {0}));
  ranks.all_to_all(at(nullptr, DType::f16, {3, 0}), at(nullptr, DType::f16, {3, 0}));
  EXPECT_TRUE(ranks.calls.empty());
}

TEST(Collectives, tensor_that_is_not_given_is_refused) {
  EXPECT_THAT(refusal([](auto& ranks) { ranks.all_gather({}, {}); }),
              HasSubstr("send: got nothing; allowed: a tensor"));
}

TEST(Collectives, receive_of_another_shape_is_refused) {
  EXPECT_THAT(refusal([](auto& ranks) { ranks.all_gather(at(kSend, DType::f16, {2}), at(kReceive, DType::f16, {6})); }),
              HasSubstr("receive: got f16[6]; allowed: rank 2: [num_ranks, shape of send]"));
  EXPECT_THAT(refusal([](auto& ranks) {
                ranks.all_gather(at(kSend, DType::f16, {2}), at(kReceive, DType::f16, {2, 2}));
              }),
              HasSubstr("receive: got f16[2, 2]; allowed: 3 (num_ranks) on axis 0"));
  EXPECT_THAT(refusal([](auto& ranks) {
                ranks.reduce_scatter(at(kSend, DType::f32, {3, 4}), at(kReceive, DType::f32, {5}));
              }),
              HasSubstr("send: got f32[3, 4]; allowed: 5 (as receive has) on axis 1"));
  EXPECT_THAT(refusal([](auto& ranks) {
                ranks.all_to_all(at(kSend, DType::f32, {3, 4}), at(kReceive, DType::f32, {3, 5}));
              }),
              HasSubstr("receive: got f32[3, 5]; allowed: 4 (as send has) on axis 1"));
}

TEST(Collectives, other_dtypes_are_refused) {
  EXPECT_THAT(refusal([](auto& ranks) {
                ranks.all_gather(at(kSend, DType::f16, {2}), at(kReceive, DType::bf16, {3, 2}));
              }),
              HasSubstr("receive: got bf16[3, 2]; allowed: dtype f16"));
  EXPECT_THAT(refusal([](auto& ranks) {
                ranks.reduce_scatter(at(kSend, DType::f16, {3, 2}), at(kReceive, DType::f16, {2}));
              }),
              HasSubstr("receive: got f16[2]; allowed: dtype f32"));
}

TEST(Collectives, strided_tensors_are_refused) {
  EXPECT_THAT(
      refusal([](auto& ranks) {
        ranks.all_gather(Tensor::strided(kSend, DType::f16, {2, 2}, {4, 1}), at(kReceive, DType::f16, {3, 2, 2}));
      }),
      HasSubstr("allowed: a row-major tensor without gaps"));
}

TEST(Collectives, memory_of_another_device_is_refused) {
  EXPECT_THAT(
      refusal([](auto& ranks) { ranks.all_to_all(at(kSend, DType::f16, {3}), at(kReceive, DType::f16, {3}, kGpu)); }),
      HasSubstr("receive: got f16[3] on cuda:2; allowed: memory of cpu"));
}

TEST(Collectives, tensors_that_overlap_are_refused) {
  auto* const inside = static_cast<std::byte*>(kSend) + 4;
  EXPECT_THAT(refusal([&](auto& ranks) { ranks.all_to_all(at(kSend, DType::f16, {3}), at(inside, DType::f16, {3})); }),
              HasSubstr("receive: got f16[3] that overlaps send; allowed: memory apart from send"));
  Recorder ranks;
  auto* const behind = static_cast<std::byte*>(kSend) + 6;
  EXPECT_NO_THROW(ranks.all_to_all(at(kSend, DType::f16, {3}), at(behind, DType::f16, {3})));
  EXPECT_NO_THROW(ranks.all_to_all(at(behind, DType::f16, {3}), at(kSend, DType::f16, {3})));
}

TEST(Collectives, five_axes_leave_no_room_for_ranks) {
  EXPECT_THAT(refusal([](auto& ranks) {
                ranks.all_gather(at(kSend, DType::f16, {1, 1, 1, 1, 1}), at(kReceive, DType::f16, {3, 1, 1, 1, 1}));
              }),
              HasSubstr("send: got f16[1, 1, 1, 1, 1]; allowed: rank 1 … 4"));
}

TEST(Collectives, floats_off_their_alignment_are_refused) {
  auto* const odd = static_cast<std::byte*>(kSend) + 2;
  EXPECT_THAT(refusal([&](auto& ranks) {
                ranks.reduce_scatter(at(odd, DType::f32, {3, 2}), at(kReceive, DType::f32, {2}));
              }),
              HasSubstr("send: got address"));
}

TEST(Collectives, makers_refuse_counts_and_timeouts_that_are_not_positive) {
  EXPECT_THROW(in_process_ranks(0), Error);
  EXPECT_THROW(in_process_ranks(2, {}, std::chrono::milliseconds(0)), Error);
}

}  // namespace
}  // namespace qkv
