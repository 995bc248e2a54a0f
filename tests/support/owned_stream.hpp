// A stream of the test's own, and graphs of what is put on it.
#pragma once

#include <functional>

#include "jit/driver.hpp"
#include "qkv/device.hpp"

namespace qkv::testing {

// On device 0.
class OwnedStream {
 public:
  OwnedStream() {
    jit::CUcontext context = nullptr;
    jit::check(jit::driver().device_primary_ctx_retain(&context, 0), "cuDevicePrimaryCtxRetain");
    jit::check(jit::driver().ctx_set_current(context), "cuCtxSetCurrent");
    jit::check(jit::driver().stream_create(&handle, jit::kStreamNonBlocking), "cuStreamCreate");
  }
  ~OwnedStream() { jit::driver().stream_destroy(handle); }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;

  Stream stream() const { return {handle}; }
  jit::CUstream handle = nullptr;
};

// The caller destroys it.
inline jit::CUgraphExec captured(jit::CUstream stream, const std::function<void()>& step) {
  jit::CUgraph graph = nullptr;
  jit::CUgraphExec replay = nullptr;
  jit::check(jit::driver().stream_begin_capture(stream, jit::CUstreamCaptureMode::relaxed), "cuStreamBeginCapture");
  step();
  jit::check(jit::driver().stream_end_capture(stream, &graph), "cuStreamEndCapture");
  jit::check(jit::driver().graph_instantiate(&replay, graph, 0), "cuGraphInstantiate");
  jit::driver().graph_destroy(graph);
  return replay;
}

}  // namespace qkv::testing
