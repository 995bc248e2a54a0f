// Text to machine code by the real compiler; no GPU is needed.
#include "jit/nvrtc.hpp"

#include <gmock/gmock.h>

#include "jit/needs_nvrtc.hpp"

namespace qkv {
namespace {

using testing::HasSubstr;

constexpr const char* kText = R"(
#include "scale.cuh"
extern "C" __global__ void multiply(float* values) {
  __shared__ float row[128];
  row[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = kScale * row[127 - threadIdx.x];
}
)";
constexpr jit::Header kHeaders[] = {{"scale.cuh", "#include \"inner/constants.cuh\"\n"},
                                    {"inner/constants.cuh", "constexpr float kScale = 2;\n"}};

jit::Source source(const char* text, const char* arch = "sm_90a") { return {"multiply f32", text, kHeaders, arch, {}}; }

using Compile = NeedsNvrtc;

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

void expect_compiles(const char* arch) {
  const jit::Compiled compiled = jit::compile(source(kText, arch));
  EXPECT_EQ(compiled.cubin.substr(0, 4),
            "\x7f"
            "ELF");
  EXPECT_EQ(compiled.entry, "multiply");
  EXPECT_GT(compiled.usage.registers, 0);
  EXPECT_EQ(compiled.usage.shared_bytes, 512);
  EXPECT_EQ(compiled.usage.spill_store_bytes + compiled.usage.spill_load_bytes, 0);
  EXPECT_TRUE(compiled.usage.serialized_wgmma.empty());
  EXPECT_GT(compiled.seconds, 0);
  EXPECT_THAT(compiled.log, HasSubstr(std::string("'multiply' for '") + arch));
}

TEST_F(Compile, hopper_code_with_headers_that_include_each_other) { expect_compiles("sm_90a"); }

TEST_F(Compile, ampere_code) { expect_compiles("sm_80"); }

TEST_F(Compile, cpp20_and_the_lowered_name_of_a_template_instance) {
  const jit::Compiled compiled = jit::compile(source(R"(
    template <int kCount> requires(kCount > 0) __global__ void count(int* out) { *out = kCount; }
    template __global__ void count<3>(int*);
  )"));
  EXPECT_THAT(compiled.entry, testing::StartsWith("_Z5countILi3E"));
}

TEST_F(Compile, spills_are_seen) {
  jit::Source tight = source(R"(
    extern "C" __global__ void spill(float* p) {
      float x[64];
      for (int i = 0; i < 64; ++i) x[i] = p[i * threadIdx.x];
      for (int i = 0; i < 64; ++i) p[i] = x[i] * x[63 - i];
    }
  )");
  EXPECT_EQ(jit::compile(tight).usage.spill_store_bytes, 0);
  tight.options = {"--maxrregcount=24"};
  const jit::KernelUsage usage = jit::compile(tight).usage;
  EXPECT_GT(usage.spill_store_bytes, 0);
  EXPECT_GT(usage.spill_load_bytes, 0);
  EXPECT_LE(usage.registers, 24);
}

TEST_F(Compile, failure_names_the_kernel_and_its_first_errors_and_keeps_the_log) {
  try {
    jit::compile(source("extern \"C\" __global__ void k() {\n  one();\n  two();\n  three();\n  four();\n}\n"));
    FAIL() << "nothing was thrown";
  } catch (const jit::CompileError& error) {
    EXPECT_EQ(error.code(), ErrorCode::internal);
    const std::string message = error.what();
    EXPECT_THAT(message, HasSubstr("multiply f32: got NVRTC_ERROR_COMPILATION, 4 errors: kernel.cu(2): error: "));
    EXPECT_THAT(message, HasSubstr("\"one\" is undefined | kernel.cu(3)"));
    EXPECT_THAT(message, HasSubstr("compiles for sm_90a"));
    EXPECT_THAT(message, testing::Not(HasSubstr("kernel.cu(5)")));
    EXPECT_THAT(error.log(), HasSubstr("kernel.cu(5): error"));
  }
}

TEST_F(Compile, unknown_instruction_is_an_error) {
  EXPECT_THAT(message_of([] { jit::compile(source("__global__ void k() { asm volatile(\"bogus;\"); }\n")); }),
              HasSubstr("errors: ptxas application ptx input"));
}

// NVRTC hides this one behind a zero in its log.
TEST_F(Compile, too_much_shared_memory_is_an_error_with_its_reason) {
  const std::string message = message_of([] {
    jit::compile(
        source("__global__ void k(int* p) {\n  __shared__ int big[100000];\n  big[threadIdx.x] = *p;\n"
               "  __syncthreads();\n  *p = big[1 + threadIdx.x];\n}\n"));
  });
  EXPECT_THAT(message, HasSubstr("got NVRTC_ERROR_COMPILATION, 1 error: ptxas error"));
  EXPECT_THAT(message, HasSubstr("uses too much shared data"));
}

TEST_F(Compile, header_that_is_not_given_is_named) {
  EXPECT_THAT(message_of([] { jit::compile(source("#include \"absent.cuh\"\n")); }), HasSubstr("absent.cuh"));
}

TEST_F(Compile, architecture_unknown_to_the_compiler_is_refused) {
  EXPECT_THAT(message_of([] { jit::compile(source(kText, "sm_12")); }),
              testing::AllOf(HasSubstr("--gpu-architecture"), HasSubstr("compiles for sm_12")));
}

TEST_F(Compile, never_returns_without_machine_code) {
  EXPECT_THAT(message_of([] { jit::compile(source(kText, "compute_90a")); }), HasSubstr("got no machine code"));
}

TEST_F(Compile, text_holds_exactly_one_kernel) {
  EXPECT_THAT(message_of([] { jit::compile(source("__device__ int value;\n")); }), HasSubstr("got 0 kernels"));
  EXPECT_THAT(message_of([] { jit::compile(source("__global__ void a() {}\n__global__ void b() {}\n")); }),
              HasSubstr("got 2 kernels; allowed: one __global__ function"));
}

}  // namespace
}  // namespace qkv
