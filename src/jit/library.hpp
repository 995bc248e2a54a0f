// A shared library opened at run time. It is never closed: functions taken from it stay valid for the whole process.
#pragma once

#include <optional>
#include <string>

namespace qkv::jit {

struct Library {
  void* handle = nullptr;
  std::string path;  // where the loader found it
};

// `name` is a path, or a bare name that the loader searches for. Nothing, and the loader's reason, if it cannot be
// opened.
std::optional<Library> open_library(const std::string& name, std::string& reason);

// nullptr if the library has no such symbol.
void* find_symbol(const Library& library, const char* symbol);

template <class Function>
bool find_function(const Library& library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(find_symbol(library, symbol));
  return function != nullptr;
}

// The folder of the shared object or program that this function was linked into.
std::string own_folder();

// For qkv::info(): what was found and where, or why not.
struct Probe {
  bool usable = false;
  std::string text;
};

}  // namespace qkv::jit
