// The functions of qkv.h for ranks.
#include "api/c_collectives.hpp"

#include "api/c_types.hpp"

using namespace qkv;       // NOLINT(google-build-using-namespace): the definitions below are namesakes outside of it
using namespace qkv::api;  // NOLINT(google-build-using-namespace)

namespace {

// The caller's own three functions.
class CallerRanks : public Collectives {
 public:
  CallerRanks(const qkv_collectives_functions& functions, void* context, int32_t rank, int32_t num_ranks, Device device)
      : Collectives(rank, num_ranks, device), functions_(functions), context_(context) {}

 protected:
  void all_gather_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    expect_0("all_gather", functions_.all_gather(context_, send, receive, row_bytes, stream.handle));
  }
  void reduce_scatter_rows(const float* send, float* receive, int64_t row_elements, Stream stream) override {
    expect_0("reduce_scatter", functions_.reduce_scatter(context_, send, receive, row_elements, stream.handle));
  }
  void all_to_all_rows(const void* send, void* receive, int64_t row_bytes, Stream stream) override {
    expect_0("all_to_all", functions_.all_to_all(context_, send, receive, row_bytes, stream.handle));
  }

 private:
  static void expect_0(const char* operation, int32_t result) {
    if (result == 0) return;
    refuse(operation, fmt::format("result {}", result), "0: the caller's function failed", ErrorCode::unavailable);
  }

  qkv_collectives_functions functions_;
  void* context_;
};

std::chrono::milliseconds timeout_from_c(int64_t timeout_ms) {
  if (timeout_ms < 0) refuse("timeout_ms", timeout_ms, "0 (a minute) or more");
  return timeout_ms == 0 ? std::chrono::minutes(1) : std::chrono::milliseconds(timeout_ms);
}

using Exchange = void (Collectives::*)(const Tensor&, const Tensor&, Stream);

qkv_status run(qkv_collectives* ranks, Exchange exchange, const qkv_tensor* send, const qkv_tensor* receive,
               qkv_stream stream) {
  return guarded([&] {
    Collectives& collectives = *required(ranks, "ranks").ranks;
    (collectives.*exchange)(from_c(send, "send"), from_c(receive, "receive"), {stream});
  });
}

}  // namespace

qkv_status qkv_in_process_ranks(int32_t num_ranks, qkv_device device, int64_t timeout_ms, qkv_collectives** ranks) {
  return guarded([&] {
    required(ranks, "ranks") = nullptr;
    const auto made = in_process_ranks(num_ranks, from_c(device, "device"), timeout_from_c(timeout_ms));
    std::vector<std::unique_ptr<qkv_collectives>> handles;  // all or none
    handles.reserve(made.size());
    for (const auto& rank : made) handles.push_back(std::make_unique<qkv_collectives>(qkv_collectives{rank}));
    for (size_t i = 0; i < handles.size(); ++i) ranks[i] = handles[i].release();
  });
}

qkv_status qkv_mpi_ranks(const int32_t* fortran_communicator, int64_t timeout_ms, qkv_collectives** ranks) {
  return create(ranks, "ranks", [&] {
    MpiOptions options;
    options.timeout = timeout_from_c(timeout_ms);
    if (fortran_communicator != nullptr) options.fortran_communicator = *fortran_communicator;
    return mpi_ranks(options);
  });
}

qkv_status qkv_nccl_unique_id(uint8_t* id) {
  return guarded([&] {
    required(id, "id");
    const NcclUniqueId made = nccl_unique_id();
    std::copy(made.begin(), made.end(), id);
  });
}

qkv_status qkv_nccl_ranks(const uint8_t* id, int32_t num_ranks, int32_t rank, int32_t device_index,
                          qkv_collectives** ranks) {
  return create(ranks, "ranks", [&] {
    NcclUniqueId copy;
    static_assert(std::tuple_size_v<NcclUniqueId> == QKV_NCCL_UNIQUE_ID_BYTES);
    std::copy_n(&required(id, "id"), copy.size(), copy.begin());
    return nccl_ranks(copy, num_ranks, rank, device_index);
  });
}

qkv_status qkv_nccl_ranks_of(void* communicator, int32_t device_index, qkv_collectives** ranks) {
  return create(ranks, "ranks", [&] { return nccl_ranks(communicator, device_index); });
}

void qkv_collectives_functions_init(qkv_collectives_functions* functions, size_t struct_size) {
  init_sized(functions, struct_size);
}

qkv_status qkv_collectives_create(const qkv_collectives_functions* functions, void* context, int32_t rank,
                                  int32_t num_ranks, qkv_device device, qkv_collectives** ranks) {
  return create(ranks, "ranks", [&] {
    const auto read = read_sized(
        functions, offsetof(qkv_collectives_functions, all_to_all) + sizeof(functions->all_to_all), "functions");
    if (read.all_gather == nullptr || read.reduce_scatter == nullptr || read.all_to_all == nullptr) {
      refuse("functions", "a null pointer among them", "all of all_gather, reduce_scatter, all_to_all");
    }
    return std::make_shared<CallerRanks>(read, context, rank, num_ranks, from_c(device, "device"));
  });
}

void qkv_collectives_destroy(qkv_collectives* ranks) { delete ranks; }

qkv_status qkv_collectives_rank(const qkv_collectives* ranks, int32_t* rank) {
  return guarded([&] { required(rank, "rank") = required(ranks, "ranks").ranks->rank(); });
}

qkv_status qkv_collectives_num_ranks(const qkv_collectives* ranks, int32_t* num_ranks) {
  return guarded([&] { required(num_ranks, "num_ranks") = required(ranks, "ranks").ranks->num_ranks(); });
}

qkv_status qkv_all_gather(qkv_collectives* ranks, const qkv_tensor* send, const qkv_tensor* receive,
                          qkv_stream stream) {
  return run(ranks, &Collectives::all_gather, send, receive, stream);
}

qkv_status qkv_reduce_scatter(qkv_collectives* ranks, const qkv_tensor* send, const qkv_tensor* receive,
                              qkv_stream stream) {
  return run(ranks, &Collectives::reduce_scatter, send, receive, stream);
}

qkv_status qkv_all_to_all(qkv_collectives* ranks, const qkv_tensor* send, const qkv_tensor* receive,
                          qkv_stream stream) {
  return run(ranks, &Collectives::all_to_all, send, receive, stream);
}

qkv_status qkv_collectives_check(qkv_collectives* ranks) {
  return guarded([&] { required(ranks, "ranks").ranks->check(); });
}
