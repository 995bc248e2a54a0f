// Random cases over the whole feature space of `qkv check`. A case is a pure function of (seed, index).
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "qkv/batch.hpp"
#include "qkv/layer.hpp"

namespace qkv::tools {

// The generator's own draws: standard distributions give other numbers on other standard libraries.
class Draw {
 public:
  Draw(uint64_t seed, int64_t index);
  int64_t range(int64_t low, int64_t high);  // both inclusive
  bool one_in(int64_t n) { return range(1, n) == 1; }
  float normal();
  template <class T>
  const T& pick(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(range(0, static_cast<int64_t>(choices.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

struct RequestLengths {
  int32_t q_len;
  int32_t kv_len;
};

// Of the request's keys, how many the layer is shown.
int32_t num_shown_keys(const LayerSpec& layer, const RequestLengths& request);

// How the cache lies in memory.
struct CacheLayout {
  std::string axes = "pth";            // outermost first: p page, t token, h head
  bool interleaved = false;            // key and value of a token side by side in one tensor
  int32_t row_padding = 0;             // unused elements after each row of a head
  bool odd_singleton_strides = false;  // axes of size 1 carry a stride of 7
};

struct Case {
  uint64_t seed = 0;
  int64_t index = 0;
  LayerSpec layer;
  CacheLayout layout;
  std::vector<RequestLengths> requests;
  // Requests whose first tokens, whole pages, lie in the same pages as those of the group's first request.
  std::vector<PrefixGroup> prefix_groups;
  bool with_prefix_groups = false;  // the batch names them
  PrefixSharing prefix_sharing = PrefixSharing::automatic;
  bool prefix_sharing_keeps_bits = true;
  KvScales query_scales = KvScales::per_tensor;  // where queries are of 8-bit floats: what has one of its own
  float magnitude = 1;                           // of queries: large ones make peaky softmaxes
  int32_t extra_rows = 0;                        // of query and out past the last request
  bool with_lse = true;
  bool with_seq_lens = true;  // encoders may leave them out
};

// `device`: the case keeps to what that engine can do.
Case draw_case(uint64_t seed, int64_t index, DeviceKind device = DeviceKind::cpu);
// Cases with the same number have the same layer.
int64_t layer_number(int64_t index, DeviceKind device);
// The case in one line of words.
std::string describe(const Case& random_case);

}  // namespace qkv::tools
