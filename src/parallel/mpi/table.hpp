// The edge between the library, which never links MPI, and its plug-in libqkv_mpi.so, which does: a table of functions.
// Each returns nullptr, or what went wrong, in MPI's words; the text is valid until the thread's next call. None waits
// for another rank.
#pragma once

#include <cstdint>

namespace qkv::parallel {

inline constexpr int32_t kMpiTableVersion = 1;
inline constexpr const char* kMpiTableSymbol = "qkv_mpi_table";

// One communicator.
struct MpiGroup;

// One row to each rank, one from each. A row says by its tag which operation it belongs to, so that ranks in different
// operations do not take each other's rows.
struct MpiRows {
  int32_t tag = 0;  // 1 or more
  int32_t row_bytes = 0;
  const void* send = nullptr;
  int64_t send_stride = 0;  // bytes from one rank's row to the next one's; 0: all are sent the same row
  void* receive = nullptr;  // row by row
};

// What a rank sent in place of the row that it was to send.
struct MpiOddRow {
  int32_t rank = -1;      // -1: there is none
  int32_t tag = 0;        // kMpiLeftTag: the rank has left
  int64_t row_bytes = 0;  // kMpiLonger: more than asked for
};
inline constexpr int64_t kMpiLonger = -1;
inline constexpr int32_t kMpiLeftTag = 1;

struct MpiTable {
  int32_t version;  // kMpiTableVersion of the plug-in's build: first, in every version

  // Initialises MPI if nobody has, and starts to duplicate the communicator; nullptr for MPI_COMM_WORLD.
  const char* (*open)(const int32_t* fortran_communicator, MpiGroup**);
  const char* (*test_open)(MpiGroup*, bool* is_done);
  const char* (*size)(MpiGroup*, int32_t* rank, int32_t* num_ranks);

  // One exchange at a time. look_around: have those whose row is missing sent something else?
  const char* (*start)(MpiGroup*, const MpiRows&);
  const char* (*test)(MpiGroup*, bool look_around, bool* is_done, MpiOddRow*);
  // Is the rank's row missing, or has it not taken ours?
  bool (*is_silent)(MpiGroup*, int32_t rank);

  // After a failure what is under way is given up, and MPI is not finalised at the end: it would wait for all ranks.
  void (*close)(MpiGroup*, bool has_failed);
};

// What kMpiTableSymbol names.
using MpiTableFunction = const MpiTable*();

}  // namespace qkv::parallel
