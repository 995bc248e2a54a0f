#include "cpu/tiles.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace qkv::cpu {

bool request_tiles() {
  constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;  // CPUID 7.0, EDX
  constexpr unsigned kAvx512Bf16 = 1U << 5;                     // CPUID 7.1, EAX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) {
    return false;
  }
  if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0 || (eax & kAvx512Bf16) == 0) return false;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace qkv::cpu
#else
namespace qkv::cpu {

bool request_tiles() { return false; }

}  // namespace qkv::cpu
#endif
