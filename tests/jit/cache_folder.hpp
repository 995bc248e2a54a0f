// A folder of a test's own, and kernels that a test can make without a compiler.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "jit/cache_entry.hpp"
#include "jit/disk_cache.hpp"

namespace qkv::testing {

class CacheFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string path = (std::filesystem::temp_directory_path() / "qkv_cache_XXXXXX").string();
    ASSERT_NE(mkdtemp(path.data()), nullptr);
    root = path;
    folder = path + "/cache";
  }
  void TearDown() override { std::filesystem::remove_all(root); }

  std::vector<std::string> files(const std::string& suffix = ".kernel") const {
    std::vector<std::string> found;
    if (!std::filesystem::exists(folder)) return found;
    for (const auto& file : std::filesystem::directory_iterator(folder)) {
      if (file.path().string().ends_with(suffix)) found.push_back(file.path().string());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  std::string root;    // there
  std::string folder;  // not there yet
};

// The folder that the process uses.
class CacheFolderInUse : public CacheFolder {
 protected:
  void SetUp() override {
    CacheFolder::SetUp();
    use(folder);
  }
  void TearDown() override {
    unsetenv("QKV_CACHE_DIR");
    CacheFolder::TearDown();
  }
  void use(const std::string& path) {
    folder = path;
    setenv("QKV_CACHE_DIR", path.c_str(), 1);
  }
};

inline std::string read_bytes(const std::string& path) {
  std::ostringstream bytes;
  bytes << std::ifstream(path, std::ios::binary).rdbuf();
  return bytes.str();
}

inline void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

// What is asked for under that key; the arch is part of it, as in key_text.
inline jit::CacheEntry wanted(const std::string& key, const std::string& arch = "sm_80") {
  return {"kernel " + key, "NVRTC 13.0", arch, arch + '\n' + key, {}};
}

// The code depends on nothing but the key, so that a wrong kernel is seen.
inline jit::Compiled code_of(const jit::CacheEntry& entry, size_t num_bytes = 200) {
  jit::Compiled compiled;
  for (int i = 0; compiled.cubin.size() < num_bytes; ++i) {
    compiled.cubin += jit::content_hash(entry.key + std::to_string(i));
  }
  compiled.log =
      "ptxas info    : Compiling entry function 'k' for 'sm_80'\nptxas info    : Used 8 registers, 16 bytes smem\n";
  compiled.usage = jit::read_usage(compiled.log);
  compiled.entry = "k";
  compiled.seconds = 0.25;
  return compiled;
}

}  // namespace qkv::testing
