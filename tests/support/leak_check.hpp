#pragma once

namespace qkv {

// LeakSanitizer looks at the memory of all threads when a program ends. Those of NVRTC, which is not built for it, can
// crash it then: programs that have used NVRTC end without that look.
void turn_leak_check_off();

}  // namespace qkv
