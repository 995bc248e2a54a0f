// One process of an MPI job; tests/parallel/mpi_test.py starts several and reads what they print.
//   mpi_ranks SCENARIO
// A rank prints "rank R: done", or "rank R: " and the error.
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "parallel/exchange_scene.hpp"
#include "qkv/status.hpp"

namespace qkv {
namespace {

using namespace std::chrono_literals;

std::shared_ptr<Collectives> ranks_within(std::chrono::milliseconds timeout) {
  MpiOptions options;
  options.timeout = timeout;
  return mpi_ranks(options);
}

// Prints in one piece, so that lines of different ranks do not mix.
void say(int32_t rank, const std::string& text) {
  const std::string line = "rank " + std::to_string(rank) + ": " + text + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) std::abort();
}

void gather_once(Collectives& ranks) { test::expect_all_gather(ranks, DType::bf16, {2, 3}, 5); }

template <class Call>
void report(Collectives& ranks, Call call) {
  try {
    call();
    say(ranks.rank(), testing::Test::HasFailure() ? "wrong values" : "done");
  } catch (const Error& error) {
    say(ranks.rank(), error.what());
  }
}

bool is_last(const Collectives& ranks) { return ranks.rank() + 1 == ranks.num_ranks(); }

void exchange() {
  const auto ranks = ranks_within(60s);
  report(*ranks, [&] {
    for (const DType dtype : test::kAllDtypes) {
      test::expect_all_gather(*ranks, dtype, {3, 5}, 11);
      test::expect_all_to_all(*ranks, dtype, {3, 5}, 11);
    }
    test::expect_random_exchanges(*ranks, 50, 3);
    test::expect_all_gather(*ranks, DType::f32, {512, 1024}, 2);  // beyond what MPI sends unasked
    test::expect_reduce_scatter(*ranks, {1024, 333}, 2);
  });
}

// The last rank comes when the others have given up; then nobody can go on.
void late() {
  const auto ranks = ranks_within(1s);
  gather_once(*ranks);
  if (is_last(*ranks)) std::this_thread::sleep_for(2s);
  report(*ranks, [&] { gather_once(*ranks); });
  report(*ranks, [&] { ranks->check(); });
  std::this_thread::sleep_for(3s);  // mpirun ends the others when this process ends
}

void leave() {
  auto ranks = ranks_within(60s);
  gather_once(*ranks);
  if (is_last(*ranks)) {
    ranks.reset();
    std::this_thread::sleep_for(2s);  // mpirun ends the others when this process ends
    return;
  }
  report(*ranks, [&] { gather_once(*ranks); });
}

void die() {
  const auto ranks = ranks_within(60s);
  gather_once(*ranks);
  if (is_last(*ranks)) std::raise(SIGKILL);
  report(*ranks, [&] { gather_once(*ranks); });
}

void differ() {
  const auto ranks = ranks_within(60s);
  report(*ranks, [&] {
    if (is_last(*ranks)) {
      test::expect_all_to_all(*ranks, DType::f32, {70000}, 1);
    } else {
      test::expect_all_gather(*ranks, DType::f32, {50000}, 1);
    }
  });
}

void differ_in_shape() {
  const auto ranks = ranks_within(60s);
  report(*ranks, [&] { test::expect_all_gather(*ranks, DType::f32, {is_last(*ranks) ? 10 : 12}, 1); });
}

// A rank that is slow, but in time, is waited for; and what was told of it does not disturb the groups that follow.
void again() {
  for (int i = 0; i < 3; ++i) {
    const auto ranks = ranks_within(60s);
    if (is_last(*ranks)) std::this_thread::sleep_for(300ms);
    report(*ranks, [&] { gather_once(*ranks); });
  }
}

void refuse_large() {
  const auto ranks = ranks_within(60s);
  report(*ranks, [&] {
    // Never touched: it is refused first.
    auto* const send = reinterpret_cast<void*>(0x1000);
    auto* const receive = reinterpret_cast<void*>(int64_t{1} << 40);
    const int64_t bytes = int64_t{1} << 31;
    ranks->all_gather(Tensor::contiguous(send, DType::f8e4m3, {bytes}),
                      Tensor::contiguous(receive, DType::f8e4m3, {ranks->num_ranks(), bytes}));
  });
  report(*ranks, [&] { gather_once(*ranks); });
}

// MPI and the communicator are the caller's: ranks in reverse order.
void bring_communicator() {
  MPI_Init(nullptr, nullptr);
  int world_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -world_rank, &reversed);
  MpiOptions options;
  options.fortran_communicator = MPI_Comm_c2f(reversed);
  auto ranks = mpi_ranks(options);
  report(*ranks, [&] {
    EXPECT_EQ(ranks->rank(), ranks->num_ranks() - 1 - world_rank);
    test::expect_random_exchanges(*ranks, 10, 3);
  });
  ranks.reset();
  MPI_Comm_free(&reversed);
  MPI_Finalize();
  try {
    mpi_ranks();
  } catch (const Error& error) {
    say(world_rank, error.what());
  }
}

void refuse_handle() {
  MpiOptions options;
  options.fortran_communicator = 123456;
  try {
    mpi_ranks(options);
  } catch (const Error& error) {
    say(0, error.what());
  }
}

int run(const std::string& scenario) {
  const std::map<std::string, void (*)()> scenarios = {
      {"exchange", exchange},
      {"late", late},
      {"leave", leave},
      {"die", die},
      {"differ", differ},
      {"differ_in_shape", differ_in_shape},
      {"again", again},
      {"refuse_large", refuse_large},
      {"bring_communicator", bring_communicator},
      {"refuse_handle", refuse_handle},
  };
  scenarios.at(scenario)();
  return testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace
}  // namespace qkv

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  return argc == 2 ? qkv::run(argv[1]) : 2;
}
