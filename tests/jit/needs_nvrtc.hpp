// Tests that compile run where NVRTC is installed; elsewhere they say why they do not.
#pragma once

#include <gtest/gtest.h>

#include "jit/nvrtc_library.hpp"
#include "support/leak_check.hpp"

namespace qkv {

class NeedsNvrtc : public ::testing::Test {
 protected:
  NeedsNvrtc() { turn_leak_check_off(); }
  void SetUp() override {
    if (const jit::Probe probe = jit::probe_nvrtc(); !probe.usable) GTEST_SKIP() << "needs NVRTC: " << probe.text;
  }
};

}  // namespace qkv
