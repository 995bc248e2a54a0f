// What a file of the compile cache holds: all that identifies a kernel, and its code, under a checksum.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "jit/nvrtc.hpp"

namespace qkv::jit {

struct CacheEntry {
  std::string name;      // the kernel in words; not part of the identity
  std::string compiler;  // "NVRTC 13.0"
  std::string arch;
  std::string key;  // key_text of the source: with the compiler, everything that can change the code
  Compiled compiled;
};

inline constexpr std::string_view kEntrySuffix = ".kernel";

// 32 hexadecimal digits, the same on every machine.
std::string content_hash(std::string_view bytes);

// Where the entry of that identity lies in the cache's folder.
std::string entry_file_name(const std::string& compiler, const std::string& key);

std::string to_bytes(const CacheEntry& entry);

// Nothing, and what is wrong in a few words, unless every byte is as it was written. Registers and spills are read from
// the compiler's log once more.
std::optional<CacheEntry> parse_entry(std::string_view bytes, std::string& fault);

// Pieces of any bytes one behind the other, each with its length: how entries and archives are written.
void append_piece(std::string& bytes, std::string_view piece);
// Takes the next piece off the front; nothing if there is no whole one.
std::optional<std::string_view> take_piece(std::string_view& bytes);

}  // namespace qkv::jit
