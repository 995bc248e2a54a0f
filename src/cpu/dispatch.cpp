// Which instruction set runs. The whole story is here: the variants in order of preference, what each needs, and how
// QKV_FORCE picks one by name.
#include <string>
#include <vector>

#include "core/environment.hpp"
#include "cpu/kernels.hpp"
#include "cpu/targets.hpp"
#include "cpu/tiles.hpp"
#include "qkv/status.hpp"

namespace qkv::cpu {

// What forward_many_rows.cpp, forward_few_rows.cpp, project_rows.cpp and row_kernels.cpp leave in the namespace of each
// of Highway's targets.
namespace N_AVX3 {
void forward_many_rows(const ForwardTask& task);
void forward_many_rows_on_tiles(const ForwardTask& task);
void forward_few_rows(const ForwardTask& task);
void project_rows(const ProjectTask& task);
extern const RowKernels kRowKernels;
}  // namespace N_AVX3
namespace N_AVX2 {
void forward_many_rows(const ForwardTask& task);
void forward_few_rows(const ForwardTask& task);
void project_rows(const ProjectTask& task);
extern const RowKernels kRowKernels;
}  // namespace N_AVX2
namespace N_SSE4 {
void forward_many_rows(const ForwardTask& task);
void forward_few_rows(const ForwardTask& task);
void project_rows(const ProjectTask& task);
extern const RowKernels kRowKernels;
}  // namespace N_SSE4
namespace N_NEON {
void forward_many_rows(const ForwardTask& task);
void forward_few_rows(const ForwardTask& task);
void project_rows(const ProjectTask& task);
extern const RowKernels kRowKernels;
}  // namespace N_NEON

namespace {

struct Variant {
  int64_t target;  // bit of hwy::SupportedTargets(); 0 = runs everywhere
  ForwardKernels kernels;
  bool (*has_more)() = nullptr;  // what it needs beyond the target
};

// Best first. A kernel of its own is a line here, before the instruction set that it extends.
constexpr Variant kVariants[] = {
#if HWY_TARGETS & HWY_AVX3
#if HWY_ARCH_X86_64
    {HWY_AVX3,
     {"amx", N_AVX3::forward_many_rows_on_tiles, N_AVX3::forward_few_rows, N_AVX3::project_rows, &N_AVX3::kRowKernels},
     request_tiles},
#endif
    {HWY_AVX3,
     {"avx512", N_AVX3::forward_many_rows, N_AVX3::forward_few_rows, N_AVX3::project_rows, &N_AVX3::kRowKernels}},
#endif
#if HWY_TARGETS & HWY_AVX2
    {HWY_AVX2,
     {"avx2", N_AVX2::forward_many_rows, N_AVX2::forward_few_rows, N_AVX2::project_rows, &N_AVX2::kRowKernels}},
#endif
#if HWY_TARGETS & HWY_SSE4
    {HWY_SSE4,
     {"sse4", N_SSE4::forward_many_rows, N_SSE4::forward_few_rows, N_SSE4::project_rows, &N_SSE4::kRowKernels}},
#endif
#if HWY_TARGETS & HWY_NEON
    {HWY_NEON,
     {"neon", N_NEON::forward_many_rows, N_NEON::forward_few_rows, N_NEON::project_rows, &N_NEON::kRowKernels}},
#endif
    {0, {"plain", forward_plain, forward_plain, project_plain, &kPlainRowKernels}},
};

std::vector<ForwardKernels> detect() {
  const int64_t supported = hwy::SupportedTargets();  // asks the operating system about the registers, too
  std::vector<ForwardKernels> kernels;
  for (const Variant& variant : kVariants) {
    if ((variant.target & ~supported) != 0) continue;
    if (variant.has_more == nullptr || variant.has_more()) kernels.push_back(variant.kernels);
  }
  return kernels;
}

}  // namespace

std::span<const ForwardKernels> all_forward_kernels() {
  static const std::vector<ForwardKernels> kernels = detect();
  return kernels;
}

std::span<const std::string_view> instruction_set_names() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (const ForwardKernels& kernels : all_forward_kernels()) list.push_back(kernels.name);
    return list;
  }();
  return names;
}

const ForwardKernels& find_forward_kernels(std::string_view name) {
  std::string names;
  for (const ForwardKernels& kernels : all_forward_kernels()) {
    if (kernels.name == name) return kernels;
    names += (names.empty() ? "" : ", ") + std::string(kernels.name);
  }
  throw Error(ErrorCode::unavailable, "QKV_FORCE", std::string(name), "on this CPU " + names);
}

const ForwardKernels& forward_kernels() {
  static const ForwardKernels& chosen = []() -> const ForwardKernels& {
    const auto forced = environment("QKV_FORCE");
    return forced ? find_forward_kernels(*forced) : all_forward_kernels().front();
  }();
  return chosen;
}

}  // namespace qkv::cpu
