// What the ranks of context parallelism exchange, and who carries it: threads of one process, MPI, NCCL, or whatever
// the host has (a class derived from Collectives). See docs/collectives.md.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "qkv/device.hpp"
#include "qkv/export.hpp"
#include "qkv/tensor.hpp"

namespace qkv {

// One rank's end of the exchange. Every rank makes the same calls in the same order, with the same shapes and dtypes,
// from one thread at a time. Tensors are contiguous, on device(), and send and receive lie apart. On a GPU the work is
// put on the stream; on the CPU it is done on return. Empty tensors are nothing to exchange.
// A rank that is missing is an Error naming it, as far as the engine can tell, and never a wrong result; from then on
// every call fails with the same reason.
class QKV_EXPORT Collectives {
 public:
  virtual ~Collectives() = default;
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return num_ranks_; }
  Device device() const { return device_; }  // whose tensors it moves

  // receive [num_ranks, shape of send]: receive[i] = rank i's send.
  void all_gather(const Tensor& send, const Tensor& receive, Stream stream = {});
  // f32. send [num_ranks, shape of receive]: receive = sum over the ranks of their send[own rank].
  void reduce_scatter(const Tensor& send, const Tensor& receive, Stream stream = {});
  // Both [num_ranks, ...]: receive[i] = rank i's send[own rank].
  void all_to_all(const Tensor& send, const Tensor& receive, Stream stream = {});

  // Throws what has gone wrong since: work on a stream may fail long after the call that put it there.
  virtual void check() {}

 protected:
  Collectives(int32_t rank, int32_t num_ranks, Device device);

  // The three calls, checked, on rows of bytes: one row a rank, all of the same length, which is not 0.
  virtual void all_gather_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) = 0;
  virtual void reduce_scatter_rows(const float* send, float* receive, int64_t row_elements, Stream stream) = 0;
  virtual void all_to_all_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) = 0;

 private:
  int32_t rank_;
  int32_t num_ranks_;
  Device device_;
};

// Ranks as threads of this process, one object a thread, for tests and for trying out. On a GPU all of them share one
// device, each with a stream of its own; their calls wait for each other on the host, and cannot be captured in a
// graph. An object that is destroyed has left: let each thread own its own. Sums are taken in the order of ranks.
QKV_EXPORT std::vector<std::shared_ptr<Collectives>> in_process_ranks(
    int32_t num_ranks, Device device = {}, std::chrono::milliseconds timeout = std::chrono::seconds(60));

struct MpiOptions {
  // How long a call may wait for the other ranks.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  // MPI_Comm_c2f of the caller's communicator, which is duplicated; not given: MPI_COMM_WORLD.
  std::optional<int32_t> fortran_communicator = {};
};

// The processes that mpirun started, for tensors of the CPU. All of them make the call. MPI is initialised if nobody
// has, and finalised at the end of the process then. Sums are taken in the order of ranks.
// Throws unavailable, with what to install, where there is no MPI.
QKV_EXPORT std::shared_ptr<Collectives> mpi_ranks(const MpiOptions& options = {});

// What the ranks of one NCCL communicator have in common: one rank makes it and hands it to the others.
using NcclUniqueId = std::array<uint8_t, 128>;
QKV_EXPORT NcclUniqueId nccl_unique_id();

// GPUs, one a rank. All ranks make the call, which waits for them. Work on streams can be captured in CUDA graphs.
// Throws unavailable, with what to install, where there is no NCCL.
QKV_EXPORT std::shared_ptr<Collectives> nccl_ranks(const NcclUniqueId& id, int32_t num_ranks, int32_t rank,
                                                   int32_t device_index);
// On an ncclComm_t of the caller's, who goes on owning it.
QKV_EXPORT std::shared_ptr<Collectives> nccl_ranks(void* communicator, int32_t device_index);

}  // namespace qkv
