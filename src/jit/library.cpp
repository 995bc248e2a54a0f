#include "jit/library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

namespace qkv::jit {
namespace {

std::string loaded_path(void* handle, const std::string& name) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || *map->l_name == '\0') return name;
  return map->l_name;
}

}  // namespace

std::optional<Library> open_library(const std::string& name, std::string& reason) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();  // NOLINT(concurrency-mt-unsafe): the loader keeps it per thread
    reason = error == nullptr ? name + ": cannot be opened" : error;
    // Of the library itself, not of one that it needs: the usual case, in fewer words.
    if (reason == name + ": cannot open shared object file: No such file or directory") reason = name + ": not found";
    return std::nullopt;
  }
  return Library{handle, loaded_path(handle, name)};
}

void* find_symbol(const Library& library, const char* symbol) { return dlsym(library.handle, symbol); }

std::string own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return "";
  std::error_code ignored;
  return std::filesystem::absolute(info.dli_fname, ignored).parent_path().string();
}

}  // namespace qkv::jit
