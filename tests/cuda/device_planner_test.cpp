// The device's planner, compiled for the host and run there, thread by thread: it makes the host planner's splits,
// joins and segments, in the places where the kernels look for them.
#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "core/index/forward_sm90_few_rows_shape.hpp"
#include "cuda/device/plan_params.hpp"
#include "cuda/kernel_key.hpp"
#include "cuda/planner_scene.hpp"
#include "plan/builder.hpp"

namespace qkv::cuda {
namespace {

namespace shape = index::few_rows;

constexpr int32_t kNumCtas = 6;

// What the kernels use of CUDA. The threads of a CTA take turns on one of the host's: a thread runs until it has to
// wait for others, so that waiting costs no time on machines of few cores. A warp runs as far ahead of the others as it
// can, and every other round warps and lanes go last to first: so a missing barrier shows.
constexpr const char* kCudaForTheHost = R"(
#include <algorithm>
#include <memory>
#include <vector>
#include <ucontext.h>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__
#define __align__(bytes)
using std::max;
using std::min;
struct int2 { int x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
struct Index { int x = 0; };
Index threadIdx, blockIdx, blockDim, gridDim;

constexpr size_t kStackBytes = 64 * 1024;
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool has_ended = false;
};
std::vector<Thread> cta;
ucontext_t turns;  // who hands them out
int num_events = 0;  // barriers passed and threads ended
inline void end_turn() { swapcontext(&cta[threadIdx.x].context, &turns); }
struct Barrier {
  int num_threads;
  int arrived = 0, phase = 0;
  void arrive_and_wait() {
    const int waits_for = phase;
    if (++arrived == num_threads) {
      arrived = 0;
      ++phase;
      ++num_events;
    }
    while (phase == waits_for) end_turn();
  }
};
Barrier cta_barrier;
inline void __syncthreads() { cta_barrier.arrive_and_wait(); }
int cta_votes = 0;
inline int __syncthreads_or(int vote) {
  cta_votes += vote != 0;
  __syncthreads();
  const int votes = cta_votes;
  __syncthreads();
  cta_votes = 0;
  __syncthreads();
  return votes;
}
inline int __clzll(long long value) { return __builtin_clzll(value); }
inline int __clz(int value) { return __builtin_clz(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(value); }
// Lanes meet before each exchange has been written, and before it is overwritten.
struct Warp {
  Barrier barrier{32};
  long long values[32];
};
std::vector<Warp> warps;
template <class Read>
auto exchange(long long value, Read read) {
  Warp& warp = warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = value;
  warp.barrier.arrive_and_wait();
  const auto result = read(warp.values);
  warp.barrier.arrive_and_wait();
  return result;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return exchange(value, [&](const long long* values) { return static_cast<T>(values[lane]); });
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(0, value, lane < distance ? lane : lane - distance);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  return exchange(vote, [](const long long* values) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(values[lane]) << lane;
    return votes;
  });
}
)";

// CTAs run one after another, each in memory full of junk.
constexpr const char* kRun = R"(
namespace qkv::cuda {
alignas(16) char shared_memory[1 << 20];
}
const qkv::cuda::PlanBatchParams* cta_params;
void run_thread() {
  qkv::cuda::plan_batch(*cta_params);
  cta[threadIdx.x].has_ended = true;
  ++num_events;
  end_turn();
}
void run_warp(int warp, bool last_first) {
  for (int events_before = -1; events_before != num_events;) {
    events_before = num_events;
    for (int i = 0; i < 32; ++i) {
      threadIdx.x = warp * 32 + (last_first ? 31 - i : i);
      Thread& thread = cta[threadIdx.x];
      if (!thread.has_ended) swapcontext(&turns, &thread.context);
    }
  }
}
void run_cta(int threads) {
  std::fill_n(qkv::cuda::shared_memory, sizeof qkv::cuda::shared_memory, 0x5A);
  cta_barrier = {threads};
  warps.assign(threads / 32, Warp{});
  cta.resize(threads);  // stacks are made once
  for (Thread& thread : cta) {
    thread.has_ended = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  const auto has_ended = [](const Thread& thread) { return thread.has_ended; };
  for (bool last_first = false; !std::all_of(cta.begin(), cta.end(), has_ended); last_first = !last_first) {
    const int num_warps = threads / 32;
    for (int i = 0; i < num_warps; ++i) run_warp(last_first ? num_warps - 1 - i : i, last_first);
  }
}
extern "C" void run(const qkv::cuda::PlanBatchParams& params, int threads) {
  cta_params = &params;
  blockDim.x = threads;
  gridDim.x = 3;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_cta(threads);
}
)";

class PlannerOnTheHost {
 public:
  explicit PlannerOnTheHost(const LayerSpec& layer) {
    std::string pattern = ::testing::TempDir() + "qkv_planner_XXXXXX";
    const char* made = mkdtemp(pattern.data());
    if (made == nullptr) throw std::runtime_error("no folder " + pattern);
    folder_ = made;
    std::ofstream(folder_ / "planner.cpp")
        << kCudaForTheHost << forward_source(layer, {"plan_batch", "host", 0, 0}).text << kRun;
    const std::string command = fmt::format(
        "'{0}' -std=c++20 -O1 -w -shared -fPIC -I'{2}' -I'{2}/cuda/device' '{1}/planner.cpp' -o '{1}/planner.so'",
        QKV_CXX_COMPILER, folder_.string(), QKV_SOURCE_FOLDER);
    if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
    library_ = dlopen((folder_ / "planner.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error(dlerror());
    run_ = reinterpret_cast<Run*>(dlsym(library_, "run"));
    if (run_ == nullptr) throw std::runtime_error(dlerror());
  }
  ~PlannerOnTheHost() {
    if (library_ != nullptr) dlclose(library_);
    std::filesystem::remove_all(folder_);
  }
  PlannerOnTheHost(const PlannerOnTheHost&) = delete;
  PlannerOnTheHost& operator=(const PlannerOnTheHost&) = delete;

  void run(const PlanBatchParams& params, int threads) const { run_(params, threads); }

 private:
  using Run = void(const PlanBatchParams&, int threads);
  std::filesystem::path folder_;
  void* library_ = nullptr;
  Run* run_ = nullptr;
};

// No two words of it are equal: what looks like a range is one.
template <class T>
std::vector<T> junk(size_t size) {
  std::vector<T> items(size);
  auto* bytes = reinterpret_cast<std::byte*>(items.data());
  for (size_t at = 0; at < size * sizeof(T); at += sizeof(int)) {
    const int word = 0x5A000000 + static_cast<int>(at);
    std::memcpy(bytes + at, &word, sizeof word);
  }
  return items;
}

// The plan's arrays on the "device", filled with junk.
struct Arrays {
  Arrays() {
    params.arrays.counts = &counts;
    params.arrays.cta_begin = cta_begin.data();
    params.arrays.key_start = key_start.data();
    params.arrays.page_start = page_start.data();
    params.arrays.tickets = tickets.data();
    params.arrays.merges = merges.data();
    params.arrays.few_rows = few_rows.data();
    params.arrays.many_rows = many_rows.data();
    for (int tile = 0; tile < kFewRowsTiles; ++tile) params.arrays.few_rows_sm90[tile] = few_rows_sm90[tile].data();
    params.arrays.segments = segments.data();
    params.arrays.max_blocks = params.arrays.max_segments = kRoom;
    params.arrays.max_tickets = params.arrays.max_merges = kRoom;
    params.arrays.max_state_rows = 1 << 30;
    for (int& most : params.arrays.max_items) most = kRoom;
    params.num_ctas = kNumCtas;
    params.few_rows_sm90 = true;
    params.max_query_len = params.max_seq_len = 1 << 20;
  }

  static constexpr int kRoom = 40'000;
  PlanBatchParams params{};
  PlanCounts counts{};
  std::vector<int> cta_begin = junk<int>(kNumCtas + 1);
  std::vector<long long> key_start = junk<long long>(5000);
  std::vector<long long> page_start = junk<long long>(5000);
  std::vector<int> tickets = junk<int>(kRoom);
  std::vector<MergeItem> merges = junk<MergeItem>(kRoom);
  std::vector<WorkItem> few_rows = junk<WorkItem>(kRoom);
  std::vector<WorkItem> many_rows = junk<WorkItem>(kRoom);
  std::vector<FewRowsItem> few_rows_sm90[kFewRowsTiles] = {junk<FewRowsItem>(kRoom), junk<FewRowsItem>(kRoom),
                                                           junk<FewRowsItem>(kRoom), junk<FewRowsItem>(kRoom)};
  std::vector<KeySegment> segments = junk<KeySegment>(kRoom);
  std::vector<PlanBlock> blocks = junk<PlanBlock>(3 * kRoom);  // of three CTAs
};

using RowsKey = std::tuple<int32_t, int32_t, int32_t>;                // request, KV head, first query
using Segment = std::tuple<int32_t, int32_t, bool>;                   // begin, end, full
using Splits = std::map<RowsKey, std::vector<std::vector<Segment>>>;  // of each block of rows, in order of keys

Splits splits_of(const plan::PlanData& plan) {
  std::map<RowsKey, std::map<int64_t, std::vector<Segment>>> by_state;
  for (const plan::WorkItem& item : plan.items) {
    auto& segments = by_state[{item.request, item.kv_head, item.query_begin}][item.state_row];
    for (int32_t s = item.segment_begin; s < item.segment_end; ++s) {
      const mask::KeySegment& segment = plan.segments[s];
      segments.emplace_back(segment.begin, segment.end, segment.tile_class == TileClass::full);
    }
  }
  Splits splits;
  for (const auto& [rows, states] : by_state) {
    for (const auto& [state, segments] : states) splits[rows].push_back(segments);
  }
  return splits;
}

// What the device made of the batch, with the places of states, joins and clusters checked on the way.
class DeviceResult {
 public:
  DeviceResult(const Arrays& arrays, const plan::PlanData& plan) : arrays_(arrays), plan_(plan) {
    for (int tile = 0; tile < kFewRowsTiles; ++tile) {
      EXPECT_EQ(arrays.counts.few_rows_sm90[tile] % 8, 0);
      for (int i = 0; i < arrays.counts.few_rows_sm90[tile]; ++i) take_few_rows(tile, i);
    }
    for (int i = 0; i < arrays.counts.few_rows; ++i) take(arrays.few_rows[i]);
    take_many_rows();
    for (const auto& [ticket, count] : arrivals_) {
      EXPECT_EQ(count, num_splits_of_ticket_[ticket]);
      EXPECT_EQ(arrays.tickets[ticket], 0);
    }
    check_merges();
  }

  Splits splits() const {
    Splits splits;
    for (const auto& [rows, by_position] : found_) {
      for (const auto& [position, segments] : by_position) splits[rows].push_back(segments);
    }
    return splits;
  }

 private:
  int rows_of(int query_begin, int query_end) const { return (query_end - query_begin) * plan_.layer.group_size(); }

  void take_segments(const RowsKey& rows, int64_t position, int begin, int end) {
    std::vector<Segment> segments;
    for (int s = begin; s < end; ++s) {
      const KeySegment& segment = arrays_.segments[s];
      segments.emplace_back(segment.begin, segment.end, segment.full != 0);
    }
    EXPECT_TRUE(found_[rows].emplace(position, segments).second) << "an item twice";
  }

  void take_state(int64_t state_row, int rows) {
    for (int row = 0; row < rows; ++row) EXPECT_TRUE(state_rows_.insert(state_row + row).second) << "a state row twice";
  }

  void take_few_rows(int tile, int i) {
    const FewRowsItem& item = arrays_.few_rows_sm90[tile][i];
    if (item.kv_head < 0) {  // its first keys are looked up all the same
      EXPECT_EQ(item.segment_begin, item.segment_end);
      EXPECT_GE(item.first.begin, item.first.end);
      return;
    }
    const int rows = rows_of(item.query_begin, item.query_end);
    EXPECT_EQ(shape::tile_rows(rows), 4 << tile);
    EXPECT_EQ(item.query_token, plan_.query_start_loc[item.request] + item.query_begin);
    EXPECT_EQ(item.cached_keys, plan_.seq_lens[item.request] - plan_.mask_inputs[item.request].q_len);
    EXPECT_EQ(item.page_start, arrays_.page_start[item.request]);
    take_segments({item.request, item.kv_head, item.query_begin}, item.split, item.segment_begin, item.segment_end);
    const KeySegment first =
        item.segment_begin < item.segment_end ? arrays_.segments[item.segment_begin] : KeySegment{0, 0, 1};
    EXPECT_EQ(std::tuple(item.first.begin, item.first.end, item.first.full),
              std::tuple(first.begin, first.end, first.full));
    EXPECT_GE(item.num_splits, 1);
    if (item.num_splits == 1) return;
    take_state(item.state_row, rows);
    if (item.ticket >= 0) {
      EXPECT_GT(item.num_splits, 8);
      ++arrivals_[item.ticket];
      num_splits_of_ticket_[item.ticket] = item.num_splits;
      first_state_[item.ticket].insert(item.state_row - item.split * rows);
      EXPECT_EQ(first_state_[item.ticket].size(), 1U);
      return;
    }
    const int first_of_join = i - item.split;
    EXPECT_EQ(first_of_join / 8, (first_of_join + item.num_splits - 1) / 8) << "a join across clusters";
    for (int s = 0; s < item.num_splits; ++s) {
      const FewRowsItem& other = arrays_.few_rows_sm90[tile][first_of_join + s];
      EXPECT_EQ(std::tuple(other.request, other.kv_head, int{other.split}), std::tuple(item.request, item.kv_head, s));
    }
  }

  void take(const WorkItem& item) {
    const RowsKey key{item.request, item.kv_head, item.query_begin};
    take_segments(key, item.state_row, item.segment_begin, item.segment_end);
    if (item.state_row < 0) return;
    take_state(item.state_row, rows_of(item.query_begin, item.query_end));
    states_to_merge_[key].insert(item.state_row);
  }

  void take_many_rows() {
    for (int i = 0; i < arrays_.counts.many_rows; ++i) take(arrays_.many_rows[i]);
    if (arrays_.params.num_ctas == 0) return;
    EXPECT_EQ(arrays_.cta_begin[0], 0);
    EXPECT_EQ(arrays_.cta_begin[kNumCtas], arrays_.counts.many_rows);
    for (int cta = 0; cta < kNumCtas; ++cta) {
      const int items = arrays_.cta_begin[cta + 1] - arrays_.cta_begin[cta];
      EXPECT_TRUE(items == arrays_.counts.many_rows / kNumCtas || items == arrays_.counts.many_rows / kNumCtas + 1);
    }
  }

  void check_merges() {
    EXPECT_EQ(static_cast<size_t>(arrays_.counts.merges), states_to_merge_.size());
    for (int i = 0; i < arrays_.counts.merges; ++i) {
      const MergeItem& merge = arrays_.merges[i];
      const auto& states = states_to_merge_[{merge.request, merge.kv_head, merge.query_begin}];
      ASSERT_EQ(static_cast<size_t>(merge.num_states), states.size());
      int64_t expected = merge.state_row;
      for (const int64_t state : states) {
        EXPECT_EQ(state, expected);
        expected += rows_of(merge.query_begin, merge.query_end);
      }
    }
  }

  const Arrays& arrays_;
  const plan::PlanData& plan_;
  std::map<RowsKey, std::map<int64_t, std::vector<Segment>>> found_;
  std::set<int64_t> state_rows_;
  std::map<int, int> arrivals_, num_splits_of_ticket_;
  std::map<int, std::set<int64_t>> first_state_;
  std::map<RowsKey, std::set<int64_t>> states_to_merge_;
};

void expect_host_plan(const PlannerOnTheHost& planner, const tools::Case& c, const char* arch, int threads) {
  const Lengths lengths(c);
  const Rules rules(c.layer, arch);
  const plan::PlanData plan = plan::build(c.layer, lengths.batch(c.layer), rules);
  Arrays arrays;
  PlanBatchParams& params = arrays.params;
  params.forward.query_start_loc = lengths.query_start_loc.data();
  params.forward.seq_lens = lengths.seq_lens.data();
  params.forward.rank = c.layer.shard.rank;
  for (size_t i = 0; i < plan.operands.size(); ++i) params.forward.mask_operands[i] = plan.operands[i].data();
  params.num_requests = plan.num_requests;
  params.block_table_stride = lengths.num_pages;
  params.rules = rules.kernels.cut;
  params.few_rows_sm90 = rules.kernels.few_rows_sm90;
  if (!rules.kernels.many_rows_sm90) params.num_ctas = 0;
  if (threads > 32) params.arrays.blocks = arrays.blocks.data();  // else they are in the CTA's own memory
  planner.run(params, threads);

  ASSERT_EQ(arrays.counts.refused, 0);
  for (int32_t r = 0; r < plan.num_requests; ++r) {
    EXPECT_EQ(arrays.page_start[r], c.layer.cache ? int64_t{r} * lengths.num_pages : plan.page_start[r]);
  }
  const DeviceResult result(arrays, plan);
  EXPECT_EQ(result.splits(), splits_of(plan));
}

TEST(device_planner, makes_the_host_planners_splits_with_any_number_of_warps) {
  for (const LayerSpec& layer : planner_layers()) {
    const PlannerOnTheHost planner(layer);
    for (int64_t i = 0; i < 40; ++i) {
      const tools::Case c = draw_batch(layer, i);
      for (const char* arch : {"sm_90a", "sm_80"}) expect_host_plan(planner, c, arch, i % 2 == 0 ? 32 : 96);
      if (HasFailure()) FAIL() << tools::describe(c);
    }
  }
}

TEST(device_planner, cuts_the_keys_that_a_rank_is_shown) {
  for (const LayerSpec& layer : sharded_planner_layers()) {
    const PlannerOnTheHost planner(layer);
    for (int64_t i = 0; i < 40; ++i) {
      const tools::Case c = draw_batch(layer, i);
      for (const char* arch : {"sm_90a", "sm_80"}) expect_host_plan(planner, c, arch, i % 2 == 0 ? 32 : 96);
      if (HasFailure()) FAIL() << tools::describe(c);
    }
  }
}

TEST(device_planner, refuses_requests_without_their_new_tokens_where_a_run_is_shown) {
  for (const KeyRun run : {KeyRun::all, KeyRun::context}) {
    LayerSpec layer = planner_layers().front();
    layer.key_run = run;
    const std::vector<int32_t> starts = {0, 3}, lengths = {2};
    Arrays arrays;
    arrays.params.forward.query_start_loc = starts.data();
    arrays.params.forward.seq_lens = lengths.data();
    arrays.params.num_requests = 1;
    arrays.params.rules = Rules(layer, "sm_90a").kernels.cut;
    PlannerOnTheHost(layer).run(arrays.params, 32);
    EXPECT_EQ(arrays.counts.refused, run == KeyRun::all ? 0 : 1);
  }
}

TEST(device_planner, plans_a_batch_of_4096_requests) {
  const LayerSpec layer = planner_layers().front();
  tools::Case c;
  c.layer = layer;
  for (int32_t r = 0; r < 4096; ++r) c.requests.push_back({r % 100 == 0 ? 30 : 1, r % 700});
  expect_host_plan(PlannerOnTheHost(layer), c, "sm_90a", 160);
}

TEST(device_planner, refuses_what_does_not_fit_and_runs_nothing) {
  const LayerSpec layer = planner_layers().front();
  const PlannerOnTheHost planner(layer);
  const Rules rules(layer, "sm_90a");
  const std::vector<int32_t> starts = {0, 1, 3}, lengths = {5000, 40};
  const auto counts_with = [&](auto change) {
    Arrays arrays;
    arrays.params.forward.query_start_loc = starts.data();
    arrays.params.forward.seq_lens = lengths.data();
    arrays.params.num_requests = 2;
    arrays.params.rules = rules.kernels.cut;
    change(arrays.params);
    planner.run(arrays.params, 32);
    return arrays.counts;
  };
  EXPECT_EQ(counts_with([](PlanBatchParams&) {}).refused, 0);
  const auto expect_refused = [&](auto change) {
    const PlanCounts counts = counts_with(change);
    EXPECT_EQ(counts.refused, 1);
    EXPECT_EQ(counts.few_rows_sm90[0] + counts.few_rows_sm90[1] + counts.few_rows + counts.many_rows, 0);
    EXPECT_EQ(counts.merges + counts.slots + counts.blocks, 0);
  };
  expect_refused([](PlanBatchParams& p) { p.max_seq_len = 4999; });
  expect_refused([](PlanBatchParams& p) { p.max_query_len = 1; });
  expect_refused([](PlanBatchParams& p) { p.arrays.max_blocks = 1; });
  expect_refused([](PlanBatchParams& p) { p.arrays.max_segments = 3; });
  expect_refused([](PlanBatchParams& p) { p.arrays.max_state_rows = 8; });
  expect_refused([](PlanBatchParams& p) { p.arrays.max_items[0] = 8; });
  expect_refused([](PlanBatchParams& p) { p.arrays.max_items[0] = 0; });
}

}  // namespace
}  // namespace qkv::cuda
