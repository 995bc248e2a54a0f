#include "support/leak_check.hpp"

namespace {
bool is_off = false;
}

// LeakSanitizer asks, where it is linked in.
extern "C" int __lsan_is_turned_off() { return is_off ? 1 : 0; }  // NOLINT(bugprone-reserved-identifier)

namespace qkv {

void turn_leak_check_off() { is_off = true; }

}  // namespace qkv
