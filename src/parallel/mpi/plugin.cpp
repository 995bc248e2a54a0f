// libqkv_mpi.so: the functions of table.hpp on whatever MPI it was built with. The only file that includes mpi.h.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "parallel/mpi/table.hpp"

namespace qkv::parallel {

struct MpiGroup {
  MPI_Comm communicator = MPI_COMM_NULL;
  MPI_Request opening = MPI_REQUEST_NULL;
  int rank = 0;
  int num_ranks = 0;
  MpiRows rows;                        // of the exchange under way
  std::vector<MPI_Request> receiving;  // [num_ranks]; null where the row is there
  std::vector<MPI_Request> sending;    // [num_ranks]
};

namespace {

// A group of this process waits in vain: MPI_Finalize would wait with it.
std::atomic<bool> any_has_failed = false;

bool is_finalized() {
  int finalized = 0;
  return MPI_Finalized(&finalized) == MPI_SUCCESS && finalized != 0;
}

void finalize_at_exit() {
  if (!any_has_failed && !is_finalized()) MPI_Finalize();
}

// A call of MPI: from any thread, one at a time. Errors come back as codes. Those of collectives and of handles that
// are none would otherwise go to MPI_COMM_WORLD's handler, which ends the process; it is the host's, and put back.
class MpiCall {
 public:
  MpiCall() : lock_(mutex()) {
    int initialized = 0;
    if (MPI_Initialized(&initialized) != MPI_SUCCESS || initialized == 0 || is_finalized()) return;
    MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before_);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  ~MpiCall() {
    if (before_ == MPI_ERRHANDLER_NULL) return;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, before_);
    MPI_Errhandler_free(&before_);
  }
  MpiCall(const MpiCall&) = delete;
  MpiCall& operator=(const MpiCall&) = delete;

 private:
  static std::mutex& mutex() {
    static auto& mutex = *new std::mutex;  // for calls of static objects at the end
    return mutex;
  }
  const std::lock_guard<std::mutex> lock_;
  MPI_Errhandler before_ = MPI_ERRHANDLER_NULL;
};

const char* text_of(int result) {
  if (result == MPI_SUCCESS) return nullptr;
  thread_local char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  return MPI_Error_string(result, text, &length) == MPI_SUCCESS ? text : "an error without a text";
}

const char* initialize() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  int initialized = 0;
  if (const char* failure = text_of(MPI_Initialized(&initialized))) return failure;
  if (is_finalized()) return "MPI has been finalised: it cannot be used any more";
  if (initialized != 0) return nullptr;
  int provided = 0;
  if (const char* failure = text_of(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided)))
    return failure;
  std::atexit(finalize_at_exit);
  return nullptr;
}

const char* open(const int32_t* fortran_communicator, MpiGroup** group) {
  if (const char* failure = initialize()) return failure;
  const MpiCall call;
  const MPI_Comm parent = fortran_communicator == nullptr ? MPI_COMM_WORLD : MPI_Comm_f2c(*fortran_communicator);
  auto opened = std::make_unique<MpiGroup>();
  if (const char* failure = text_of(MPI_Comm_idup(parent, &opened->communicator, &opened->opening))) return failure;
  *group = opened.release();
  return nullptr;
}

const char* test_open(MpiGroup* group, bool* is_done) {
  const MpiCall call;
  int done = 0;
  const char* failure = text_of(MPI_Test(&group->opening, &done, MPI_STATUS_IGNORE));
  *is_done = done != 0;
  return failure;
}

const char* size(MpiGroup* group, int32_t* rank, int32_t* num_ranks) {
  const MpiCall call;
  int result = MPI_Comm_set_errhandler(group->communicator, MPI_ERRORS_RETURN);
  if (result == MPI_SUCCESS) result = MPI_Comm_rank(group->communicator, &group->rank);
  if (result == MPI_SUCCESS) result = MPI_Comm_size(group->communicator, &group->num_ranks);
  *rank = group->rank;
  *num_ranks = group->num_ranks;
  group->receiving.assign(static_cast<size_t>(group->num_ranks), MPI_REQUEST_NULL);
  group->sending.assign(static_cast<size_t>(group->num_ranks), MPI_REQUEST_NULL);
  return text_of(result);
}

const std::byte* row_to(const MpiRows& rows, int rank) {
  return static_cast<const std::byte*>(rows.send) + rank * rows.send_stride;
}

std::byte* row_from(const MpiRows& rows, int rank) {
  return static_cast<std::byte*>(rows.receive) + static_cast<int64_t>(rank) * rows.row_bytes;
}

const char* start(MpiGroup* group, const MpiRows& rows) {
  const MpiCall call;
  group->rows = rows;
  int result = MPI_SUCCESS;
  // Places to receive first: rows that come early need no copy then.
  for (int from = 0; from < group->num_ranks && result == MPI_SUCCESS; ++from) {
    if (from == group->rank) continue;
    result = MPI_Irecv(row_from(rows, from), rows.row_bytes, MPI_BYTE, from, rows.tag, group->communicator,
                       &group->receiving[static_cast<size_t>(from)]);
  }
  for (int i = 1; i < group->num_ranks && result == MPI_SUCCESS; ++i) {
    const int to = (group->rank + i) % group->num_ranks;  // so that not all begin with the same one
    result = MPI_Isend(row_to(rows, to), rows.row_bytes, MPI_BYTE, to, rows.tag, group->communicator,
                       &group->sending[static_cast<size_t>(to)]);
  }
  std::memcpy(row_from(rows, group->rank), row_to(rows, group->rank), static_cast<size_t>(rows.row_bytes));
  return text_of(result);
}

bool is_truncation(int result) {
  int error_class = MPI_SUCCESS;
  return result != MPI_SUCCESS && MPI_Error_class(result, &error_class) == MPI_SUCCESS &&
         error_class == MPI_ERR_TRUNCATE;
}

// A row that came with another length than ours is odd.
int test_receiving(MpiGroup& group, int from, MpiOddRow& odd) {
  MPI_Request& request = group.receiving[static_cast<size_t>(from)];
  if (request == MPI_REQUEST_NULL) return MPI_SUCCESS;
  int done = 0;
  MPI_Status status;
  const int result = MPI_Test(&request, &done, &status);
  if (is_truncation(result)) {
    odd = {from, group.rows.tag, kMpiLonger};
    return MPI_SUCCESS;
  }
  if (result != MPI_SUCCESS || done == 0) return result;
  int num_bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &num_bytes);
  if (num_bytes != group.rows.row_bytes) odd = {from, group.rows.tag, num_bytes};
  return MPI_SUCCESS;
}

// From one rank, rows come in the order in which they were sent: one that our receive did not take stands for the row
// that is missing.
int look_for_other(MpiGroup& group, int from, MpiOddRow& odd) {
  if (group.receiving[static_cast<size_t>(from)] == MPI_REQUEST_NULL) return MPI_SUCCESS;
  int is_there = 0;
  MPI_Status status;
  const int result = MPI_Iprobe(from, MPI_ANY_TAG, group.communicator, &is_there, &status);
  if (result != MPI_SUCCESS || is_there == 0 || status.MPI_TAG == group.rows.tag) return result;
  int num_bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &num_bytes);
  odd = {from, status.MPI_TAG, num_bytes};
  return MPI_SUCCESS;
}

const char* test(MpiGroup* group, bool look_around, bool* is_done, MpiOddRow* odd) {
  const MpiCall call;
  *is_done = true;
  for (int rank = 0; rank < group->num_ranks; ++rank) {
    int result = test_receiving(*group, rank, *odd);
    if (result == MPI_SUCCESS && look_around) result = look_for_other(*group, rank, *odd);
    MPI_Request& sending = group->sending[static_cast<size_t>(rank)];
    int sent = 1;
    if (result == MPI_SUCCESS && sending != MPI_REQUEST_NULL) result = MPI_Test(&sending, &sent, MPI_STATUS_IGNORE);
    if (result != MPI_SUCCESS) return text_of(result);
    if (sent == 0 || group->receiving[static_cast<size_t>(rank)] != MPI_REQUEST_NULL) *is_done = false;
  }
  return nullptr;
}

bool is_silent(MpiGroup* group, int32_t rank) {
  const auto i = static_cast<size_t>(rank);
  return group->receiving[i] != MPI_REQUEST_NULL || group->sending[i] != MPI_REQUEST_NULL;
}

// Empty rows, so that no memory of ours need live on.
void tell_that_we_leave(const MpiGroup& group) {
  for (int to = 0; to < group.num_ranks; ++to) {
    if (to == group.rank) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Isend(nullptr, 0, MPI_BYTE, to, kMpiLeftTag, group.communicator, &request) != MPI_SUCCESS) return;
    MPI_Request_free(&request);
  }
}

void cancel_receives(MpiGroup& group) {
  for (MPI_Request& request : group.receiving) {
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    MPI_Request_free(&request);
  }
}

// The communicator stays until MPI_Finalize. To free it is an operation of all ranks, who do not part at the same time:
// OpenMPI 4.1 then hangs when the next one is made.
void close(MpiGroup* group, bool has_failed) {
  const MpiCall call;
  if (has_failed) any_has_failed = true;
  if (!is_finalized()) {
    cancel_receives(*group);
    tell_that_we_leave(*group);
  }
  if (group->opening == MPI_REQUEST_NULL) delete group;  // otherwise MPI still writes the communicator there
}

}  // namespace
}  // namespace qkv::parallel

extern "C" __attribute__((visibility("default"))) const qkv::parallel::MpiTable* qkv_mpi_table() {
  using namespace qkv::parallel;  // NOLINT(google-build-using-namespace): the table names them all
  static constexpr MpiTable kTable = {kMpiTableVersion, open, test_open, size, start, test, is_silent, close};
  return &kTable;
}
