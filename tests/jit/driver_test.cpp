// The driver library: absent, of too old a kind, without a device. None of it needs a GPU.
#include "jit/driver.hpp"

#include <gmock/gmock.h>

#include <filesystem>

#include "qkv/status.hpp"

namespace qkv {
namespace {

using testing::HasSubstr;

template <class Call>
Error error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::internal, "", "", "");
}

// CUDA's names, as far as these tests go.
jit::CUresult name_of(jit::CUresult result, const char** name) {
  if (result == jit::kErrorOutOfMemory) *name = "CUDA_ERROR_OUT_OF_MEMORY";
  if (result == 1) *name = "CUDA_ERROR_INVALID_VALUE";
  return jit::kSuccess;
}
jit::CUresult text_of(jit::CUresult result, const char** text) {
  if (result == jit::kErrorOutOfMemory) *text = "out of memory";
  if (result == 1) *text = "invalid argument";
  return jit::kSuccess;
}
jit::DriverFunctions naming_functions() {
  jit::DriverFunctions functions{};
  functions.get_error_name = name_of;
  functions.get_error_string = text_of;
  return functions;
}

TEST(Driver, absent_library_is_named_with_what_to_install) {
  const Error error = error_of([] { jit::open_driver({"libcuda-of-nowhere.so.1", "/nowhere/libcuda.so.1"}); });
  EXPECT_EQ(error.code(), ErrorCode::unavailable);
  EXPECT_EQ(error.argument(), "libcuda.so.1");
  EXPECT_EQ(error.value(),
            "no library that opens (libcuda-of-nowhere.so.1: not found; /nowhere/libcuda.so.1: not found)");
  EXPECT_THAT(error.allowed(), HasSubstr("NVIDIA's driver for CUDA 12.0 or later"));
}

TEST(Driver, library_without_a_function_that_we_need_is_named_with_it) {
  const Error error = error_of([] { jit::open_driver({"libc.so.6"}); });
  EXPECT_EQ(error.code(), ErrorCode::unavailable);
  EXPECT_THAT(error.value(), HasSubstr("libc.so.6 without cuGetErrorName"));
}

// A toolkit brings a libcuda to link with, in which every call fails: it has all our symbols, and no device.
TEST(Driver, failing_init_carries_cuda_text) {
  const std::string stub = "/usr/local/cuda/lib64/stubs/libcuda.so";
  if (!std::filesystem::exists(stub)) GTEST_SKIP() << "no CUDA toolkit with its stub of libcuda";
  const Error error = error_of([&] { jit::open_driver({stub}); });
  EXPECT_EQ(error.code(), ErrorCode::unavailable);
  EXPECT_EQ(error.argument(), "libcuda.so.1");
  EXPECT_THAT(error.value(), HasSubstr("from cuInit of " + stub));
  EXPECT_THAT(error.value(), HasSubstr("CUDA"));
  EXPECT_THAT(error.allowed(), HasSubstr("a GPU that this process may use"));
}

TEST(Driver, probe_tells_and_never_throws) {
  const jit::Probe probe = jit::probe_driver();
  EXPECT_THAT(probe.text, HasSubstr(probe.usable ? "device 0: " : "libcuda.so.1"));
}

TEST(Driver, failed_launch_says_what_was_launched) {
  const Error error = error_of(
      [] { jit::throw_failure(naming_functions(), 1, "cuLaunchKernelEx", "merge bf16, grid 12 x 1 x 1 of 128"); });
  EXPECT_EQ(error.code(), ErrorCode::internal);
  EXPECT_STREQ(error.what(),
               "cuLaunchKernelEx: got CUDA_ERROR_INVALID_VALUE (invalid argument) for merge bf16, grid 12 x 1 x 1 of "
               "128; allowed: CUDA_SUCCESS");
}

TEST(Driver, lack_of_memory_is_told_apart) {
  const Error error =
      error_of([] { jit::throw_failure(naming_functions(), jit::kErrorOutOfMemory, "cuMemAlloc", "96 GiB"); });
  EXPECT_EQ(error.code(), ErrorCode::unavailable);
  EXPECT_EQ(error.value(), "CUDA_ERROR_OUT_OF_MEMORY (out of memory) for 96 GiB");
}

TEST(Driver, unknown_error_keeps_its_number) {
  EXPECT_EQ(jit::error_text(naming_functions(), 4321), "CUDA error 4321");
}

TEST(Driver, describing_costs_nothing_without_a_failure) {
  bool described = false;
  jit::check(jit::kSuccess, "cuLaunchKernelEx", [&] {
    described = true;
    return std::string();
  });
  EXPECT_FALSE(described);
}

}  // namespace
}  // namespace qkv
