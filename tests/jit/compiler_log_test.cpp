// What is read out of a compiler's log.
#include "jit/compiler_log.hpp"

#include <gmock/gmock.h>

namespace qkv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr const char* kLog = R"(ptxas info    : 4 bytes gmem, 8 bytes cmem[4]
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'forward'
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
ptxas         .     312 bytes stack frame, 496 bytes spill stores, 500 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 312 bytes cumulative stack size, 512 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 23.113 ms
ptxas info    : Function properties for _Z1gff
ptxas         .     8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
)";

TEST(CompilerLog, registers_shared_memory_and_spills) {
  const jit::KernelUsage usage = jit::read_usage(kLog);
  EXPECT_THAT(usage.entries, ElementsAre("forward"));
  EXPECT_EQ(usage.registers, 168);
  EXPECT_EQ(usage.shared_bytes, 512);
}

TEST(CompilerLog, spills_of_functions_that_were_not_inlined_count) {
  const jit::KernelUsage usage = jit::read_usage(kLog);
  EXPECT_EQ(usage.stack_bytes, 320);
  EXPECT_EQ(usage.spill_store_bytes, 500);
  EXPECT_EQ(usage.spill_load_bytes, 504);
}

TEST(CompilerLog, serialized_wgmma_is_recorded) {
  EXPECT_THAT(jit::read_usage(kLog).serialized_wgmma, ElementsAre(HasSubstr("(C7510) Potential")));
  EXPECT_THAT(jit::read_usage("ptxas info : (C7510x) no\nptxas info : (C7600) no\n(C751").serialized_wgmma, IsEmpty());
}

TEST(CompilerLog, every_kernel_is_named) {
  const jit::KernelUsage usage = jit::read_usage(
      "ptxas info    : Compiling entry function 'a' for 'sm_80'\nptxas info    : Used 8 registers, 16 bytes smem\n"
      "ptxas info    : Compiling entry function 'b' for 'sm_80'\nptxas info    : Used 6 registers\n");
  EXPECT_THAT(usage.entries, ElementsAre("a", "b"));
  EXPECT_EQ(usage.registers, 8);
  EXPECT_EQ(usage.shared_bytes, 16);
}

TEST(CompilerLog, empty_log_reads_as_nothing) {
  const jit::KernelUsage usage = jit::read_usage("");
  EXPECT_THAT(usage.entries, IsEmpty());
  EXPECT_EQ(usage.registers, 0);
}

TEST(CompilerLog, first_errors_are_counted_and_shown) {
  std::string log = "kernel.cu(1): warning #177-D: variable \"x\" was declared but never referenced\n";
  for (int i = 1; i <= 9; ++i) log += "kernel.cu(" + std::to_string(i) + "): error: wrong\n  line\n  ^\n\n";
  const std::string errors = jit::first_errors(log);
  EXPECT_THAT(errors, HasSubstr("9 errors: kernel.cu(1): error: wrong | kernel.cu(2): error: wrong | "));
  EXPECT_THAT(errors, Not(HasSubstr("kernel.cu(4)")));
  EXPECT_THAT(errors, Not(HasSubstr("warning")));
  EXPECT_THAT(errors, Not(HasSubstr("\n")));
}

TEST(CompilerLog, long_errors_are_shortened) {
  const std::string errors = jit::first_errors("kernel.cu(1): error: " + std::string(5000, 'x') + "\n");
  EXPECT_LT(errors.size(), 450u);
  EXPECT_THAT(errors, HasSubstr("1 error: kernel.cu(1)"));
}

TEST(CompilerLog, errors_of_ptxas_and_of_options_are_errors) {
  EXPECT_THAT(jit::first_errors("ptxas application ptx input, line 23; error   : Not a name of any instruction\n"),
              HasSubstr("1 error: ptxas application"));
  EXPECT_THAT(jit::first_errors("ptxas fatal   : Ptx assembly aborted due to errors\n"), HasSubstr("1 error: ptxas f"));
  EXPECT_THAT(jit::first_errors("nvrtc: error: invalid value for --gpu-architecture (-arch)\n"),
              HasSubstr("1 error: nvrtc"));
}

TEST(CompilerLog, log_without_an_error_is_shown_as_it_begins) {
  EXPECT_EQ(jit::first_errors("ptxas info    : Used 10 registers, 400000 bytes smem\nptxas info    : errors\n"),
            "the log names no error: ptxas info    : Used 10 registers, 400000 bytes smem | ptxas info    : errors");
}

}  // namespace
}  // namespace qkv
