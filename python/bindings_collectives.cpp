// What ranks exchange, and who carries it.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "bindings.hpp"

namespace qkv::python {
namespace {

std::chrono::milliseconds parse_timeout(double seconds) {
  constexpr double kMost = 1e9;
  if (!(seconds >= 0.001 && seconds <= kMost)) {
    throw Error(ErrorCode::invalid_argument, "timeout", std::to_string(seconds), "0.001 … 1e9 seconds");
  }
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

using Exchange = void (Collectives::*)(const Tensor&, const Tensor&, Stream);

// A call that waits for other ranks, which may be threads of this interpreter.
template <Exchange kExchange>
void exchange(Collectives& ranks, const ArrayArgument& send, const ArrayArgument& receive,
              const StreamArgument& stream) {
  const HeldTensor send_tensor = read_tensor(send, "send");
  const HeldTensor receive_tensor = write_tensor(receive, "receive");
  const Stream on = read_stream(stream, ranks.device());
  const nb::gil_scoped_release released;
  (ranks.*kExchange)(send_tensor.view, receive_tensor.view, on);
}

template <Exchange kExchange>
void def_exchange(nb::class_<Collectives>& type, const char* name, const char* text) {
  type.def(name, &exchange<kExchange>, nb::arg("send"), nb::arg("receive"), nb::kw_only(),
           nb::arg("stream") = nb::none(), text);
}

std::shared_ptr<Collectives> ranks_of_mpi(double timeout, std::optional<int32_t> fortran_communicator) {
  const MpiOptions options{parse_timeout(timeout), fortran_communicator};
  const nb::gil_scoped_release released;
  return mpi_ranks(options);
}

nb::bytes unique_id() {
  const NcclUniqueId id = nccl_unique_id();
  return nb::bytes(id.data(), id.size());
}

std::shared_ptr<Collectives> ranks_of_nccl(const nb::bytes& id, int32_t num_ranks, int32_t rank, int32_t device_index) {
  NcclUniqueId bytes;
  if (id.size() != bytes.size()) {
    throw Error(ErrorCode::invalid_argument, "id", std::to_string(id.size()) + " bytes",
                std::to_string(bytes.size()) + " bytes, from nccl_unique_id() of one of the ranks");
  }
  std::copy_n(static_cast<const uint8_t*>(id.data()), bytes.size(), bytes.begin());
  const nb::gil_scoped_release released;
  return nccl_ranks(bytes, num_ranks, rank, device_index);
}

std::shared_ptr<Collectives> ranks_of_communicator(uintptr_t communicator, int32_t device_index) {
  return nccl_ranks(reinterpret_cast<void*>(communicator), device_index);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

void bind_collectives(nb::module_& module) {
  auto type = nb::class_<Collectives>(
      module, "Collectives",
      "One rank's end of what ranks exchange. Every rank makes the same calls in the same order, with the same shapes "
      "and dtypes. A rank that is missing is an Error naming it; from then on every call fails with the same reason.");
  type.def_prop_ro("rank", &Collectives::rank)
      .def_prop_ro("num_ranks", &Collectives::num_ranks)
      .def_prop_ro(
          "device", [](const Collectives& ranks) { return to_string(ranks.device()); }, "Whose tensors it moves.");
  def_exchange<&Collectives::all_gather>(
      type, "all_gather",
      "receive[i] = rank i's send.\n\n"
      "send: any shape, contiguous. receive: [num_ranks, shape of send]. stream: as in Attention.");
  def_exchange<&Collectives::reduce_scatter>(
      type, "reduce_scatter",
      "receive = sum over the ranks of their send[own rank].\n\n"
      "send: float32 [num_ranks, shape of receive], contiguous. stream: as in Attention.");
  def_exchange<&Collectives::all_to_all>(type, "all_to_all",
                                         "receive[i] = rank i's send[own rank].\n\n"
                                         "send, receive: [num_ranks, ...], contiguous. stream: as in Attention.");
  type.def("check", &Collectives::check, nb::call_guard<nb::gil_scoped_release>(),
           "Raises what has gone wrong since: work on a stream may fail after the call that put it there.");

  module.def(
      "in_process_ranks",
      [](int32_t num_ranks, const std::string& device, double timeout) {
        return in_process_ranks(num_ranks, parse_device(device), parse_timeout(timeout));
      },
      nb::arg("num_ranks"), nb::kw_only(), nb::arg("device") = "cpu", nb::arg("timeout") = 60.0,
      "Ranks as threads of this process, one object a thread: for tests and for trying out.\n\n"
      "timeout: seconds that a call may wait for the other ranks.");
  module.def("mpi_ranks", &ranks_of_mpi, nb::kw_only(), nb::arg("timeout") = 60.0,
             nb::arg("fortran_communicator") = nb::none(),
             "The processes that mpirun started, for tensors of the CPU. All of them make the call.\n\n"
             "timeout: seconds that a call may wait for the other ranks.\n"
             "fortran_communicator: an MPI communicator, which is duplicated, such as mpi4py's comm.py2f(). None: "
             "MPI_COMM_WORLD.");
  module.def("nccl_unique_id", &unique_id,
             "What the ranks of one NCCL communicator have in common: one rank makes it and hands it to the others.");
  module.def("nccl_ranks", &ranks_of_nccl, nb::arg("id"), nb::arg("num_ranks"), nb::arg("rank"),
             nb::arg("device_index"), "GPUs, one a rank. All ranks make the call, which waits for them.");
  module.def("nccl_ranks", &ranks_of_communicator, nb::arg("communicator"), nb::arg("device_index"),
             "On the caller's ncclComm_t, by its address.");
}

}  // namespace qkv::python
