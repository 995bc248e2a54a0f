// Which of Highway's targets the kernels are compiled for. Included before any Highway header by every file that is
// compiled once a target, and by the dispatch, so that all agree.
#pragma once

// Neighbours of a wider or equal target that would only cost compile time: SSSE3 beside SSE4, and AVX-512 with VNNI and
// the like beside plain AVX-512. Scalable vectors (SVE, RVV) cannot be held in the arrays of the micro-kernels.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#include <hwy/targets.h>

// The portable fallback of Highway is slower than the plain definition is simple: where no vectors are known, the
// kernels are forward_plain, and nothing is compiled for this target.
#define QKV_TARGET_HAS_VECTORS (HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128)

// AMX extends AVX-512: its tiles multiply bf16.
#define QKV_TARGET_HAS_TILES (HWY_ARCH_X86_64 && HWY_TARGET == HWY_AVX3)
