// Stands for NCCL where there is no GPU: does nothing, writes down what it is asked, and fails when told to.
// FAKE_VERSION is what it says it is; with FAKE_LACKS_SEND a function is missing.
#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  char internal[128];
} id_type;

static char calls[4096];
static int results_until_failure = -1;  // -1: never
static int failure = 2;
static int async_error = 0;
static int num_ranks = 3, own_rank = 1;

const char* fake_nccl_calls(void) { return calls; }
// The call after `successes` of those that are written down fails with `result`.
void fake_nccl_fail(int successes, int result) {
  results_until_failure = successes;
  failure = result;
}
void fake_nccl_set_async_error(int result) { async_error = result; }
void fake_nccl_reset(void) {
  calls[0] = '\0';
  results_until_failure = -1;
  async_error = 0;
}

static int write_down(const char* line) {
  if (strlen(calls) + strlen(line) + 2 < sizeof calls) {
    strcat(calls, line);
    strcat(calls, "\n");
  }
  if (results_until_failure == 0) {
    results_until_failure = -1;
    return failure;
  }
  if (results_until_failure > 0) --results_until_failure;
  return 0;
}

int ncclGetVersion(int* version) {
  *version = FAKE_VERSION;
  return 0;
}
const char* ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "unhandled system error"; }
const char* ncclGetLastError(void* communicator) { return communicator == NULL ? "" : "socket closed by rank 2"; }
int ncclGetUniqueId(id_type* id) {
  for (int i = 0; i < 128; ++i) id->internal[i] = (char)(i * 3);
  return 0;
}
int ncclCommInitRank(void** communicator, int count, id_type id, int rank) {
  char line[64];
  snprintf(line, sizeof line, "init %d of %d, id %d", rank, count, id.internal[1]);
  num_ranks = count;
  own_rank = rank;
  *communicator = calls;
  return write_down(line);
}
int ncclCommDestroy(void* communicator) {
  (void)communicator;
  return write_down("destroy");
}
int ncclCommAbort(void* communicator) {
  (void)communicator;
  return write_down("abort");
}
int ncclCommGetAsyncError(void* communicator, int* result) {
  (void)communicator;
  *result = async_error;
  return 0;
}
int ncclCommCount(void* communicator, int* count) {
  (void)communicator;
  *count = num_ranks;
  return 0;
}
int ncclCommUserRank(void* communicator, int* rank) {
  (void)communicator;
  *rank = own_rank;
  return 0;
}
int ncclCommCuDevice(void* communicator, int* device) {
  (void)communicator;
  *device = 0;
  return 0;
}

int ncclAllGather(const void* send, void* receive, size_t count, int type, void* communicator, void* stream) {
  char line[128];
  (void)communicator;
  snprintf(line, sizeof line, "all_gather %p %p, %zu of type %d on %p", send, receive, count, type, stream);
  return write_down(line);
}
int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int operation, void* communicator,
                      void* stream) {
  char line[128];
  (void)communicator;
  snprintf(line, sizeof line, "reduce_scatter %p %p, %zu of type %d by %d on %p", send, receive, count, type, operation,
           stream);
  return write_down(line);
}
#ifndef FAKE_LACKS_SEND
int ncclSend(const void* send, size_t count, int type, int to, void* communicator, void* stream) {
  char line[128];
  (void)communicator;
  snprintf(line, sizeof line, "send %p, %zu of type %d to %d on %p", send, count, type, to, stream);
  return write_down(line);
}
#endif
int ncclRecv(void* receive, size_t count, int type, int from, void* communicator, void* stream) {
  char line[128];
  (void)communicator;
  snprintf(line, sizeof line, "receive %p, %zu of type %d from %d on %p", receive, count, type, from, stream);
  return write_down(line);
}
int ncclGroupStart(void) { return write_down("group"); }
int ncclGroupEnd(void) { return write_down("end of group"); }
