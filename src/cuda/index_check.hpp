// QKV_CHECK=1: before each call, a kernel of its own looks at what the plan's index arrays hold on the device. They
// were right when the plan was built; this finds memory that was overwritten since. The call waits for the answer.
#pragma once

#include <cstdint>
#include <mutex>

#include "cuda/device/check_params.hpp"
#include "cuda/device/params.hpp"
#include "cuda/memory.hpp"
#include "jit/module.hpp"
#include "plan/plan_data.hpp"
#include "qkv/status.hpp"

namespace qkv::cuda {

class IndexCheck {
 public:
  IndexCheck(int32_t device_index, const std::string& arch);

  // Lengths and pages of a plan for a layer with a cache of `num_pages` pages. Throws, naming request and position.
  void check_pages(const plan::PlanData& plan, const ForwardParams& placed, int64_t num_pages,
                   jit::CUstream stream) const;
  void check_slots(const plan::PlanData& plan, const int64_t* placed_slots, int64_t num_cache_slots,
                   jit::CUstream stream) const;

 private:
  FirstBad run(CheckIndicesParams params, int64_t longest_array, jit::CUstream stream) const;

  const jit::Kernel* kernel_;
  DeviceBuffer found_;
  mutable std::mutex mutex_;  // of found_: layers are shared by threads
};

// The errors, in words: what is at that place of the device's array, whose it is, what may be there.
Error bad_length(const plan::PlanData& plan, int64_t request, int32_t value);
Error bad_page(const plan::PlanData& plan, int64_t entry, int32_t value, int64_t num_pages);
Error bad_slot(const plan::PlanData& plan, int64_t row, int64_t value, int64_t num_cache_slots);

}  // namespace qkv::cuda
