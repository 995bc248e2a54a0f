// The tile registers of AMX.
#pragma once

namespace qkv::cpu {

// True where this CPU multiplies tiles of bf16 and the operating system lets this process use them: Linux gives them to
// those that ask, for all their threads.
bool request_tiles();

}  // namespace qkv::cpu
