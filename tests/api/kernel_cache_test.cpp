// The cache's public calls: what is listed, and kernels that move from one folder to another.
#include "qkv/kernel_cache.hpp"

#include <gmock/gmock.h>

#include "jit/cache_folder.hpp"
#include "qkv/status.hpp"

namespace qkv {
namespace {

using testing::code_of;
using ::testing::HasSubstr;
using testing::wanted;

constexpr int64_t kAmple = int64_t{1} << 30;

class KernelCache : public testing::CacheFolderInUse {
 protected:
  // Returns whether it was compiled.
  bool get(const std::string& key, const std::string& arch = "sm_80") const {
    bool compiled = false;
    jit::DiskCache(folder, kAmple).get(wanted(key, arch), [&] {
      compiled = true;
      return code_of(wanted(key, arch));
    });
    return compiled;
  }

  std::string archive() const { return root + "/kernels.qkv"; }

  template <class Call>
  static Error error_of(Call call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "nothing was thrown";
    return {ErrorCode::internal, "", "", ""};
  }
};

TEST_F(KernelCache, folder_that_is_not_there_has_no_kernels) {
  EXPECT_EQ(kernel_cache_place().folder, folder);
  EXPECT_EQ(kernel_cache_place().origin, "QKV_CACHE_DIR");
  EXPECT_TRUE(cached_kernels().empty());
  EXPECT_EQ(clear_kernel_cache(), 0);
  EXPECT_EQ(export_kernels(archive()), 0);
  EXPECT_EQ(import_kernels(archive()), 0);
}

TEST_F(KernelCache, list_tells_sound_from_damaged) {
  get("a");
  get("b");
  get("c");
  testing::write_bytes(files()[0], "");
  std::filesystem::rename(files()[1], folder + "/0123.kernel");
  int sound = 0;
  for (const CachedKernel& kernel : cached_kernels()) {
    if (kernel.path.ends_with("/0123.kernel")) {
      EXPECT_EQ(kernel.fault, "it is another kernel's");
    } else if (kernel.num_bytes == 0) {
      EXPECT_EQ(kernel.fault, "it is empty");
    } else {
      ++sound;
      EXPECT_EQ(kernel.fault, "");
      EXPECT_THAT(kernel.name, HasSubstr("kernel "));
      EXPECT_EQ(kernel.arch, "sm_80");
      EXPECT_EQ(kernel.compiler, "NVRTC 13.0");
      EXPECT_EQ(kernel.registers, 8);
      EXPECT_EQ(kernel.compile_seconds, 0.25);
    }
  }
  EXPECT_EQ(sound, 1);
  EXPECT_EQ(clear_kernel_cache(), 3);
  EXPECT_TRUE(files().empty());
}

TEST_F(KernelCache, archive_serves_another_folder) {
  get("a");
  get("b", "sm_90a");
  EXPECT_EQ(export_kernels(archive()), 2);
  use(root + "/other");
  EXPECT_EQ(import_kernels(archive()), 2);
  EXPECT_FALSE(get("a"));
  EXPECT_FALSE(get("b", "sm_90a"));
  EXPECT_TRUE(get("a", "sm_90a"));
}

TEST_F(KernelCache, archive_of_one_architecture) {
  get("a");
  get("b", "sm_90a");
  EXPECT_EQ(export_kernels(archive(), "sm_90a"), 1);
  use(root + "/other");
  EXPECT_EQ(import_kernels(archive()), 1);
  EXPECT_FALSE(get("b", "sm_90a"));
}

TEST_F(KernelCache, damaged_entries_are_not_exported) {
  get("a");
  get("b");
  testing::write_bytes(files()[0], "");
  EXPECT_EQ(export_kernels(archive()), 1);
}

TEST_F(KernelCache, damaged_archive_is_refused_before_anything_is_written) {
  get("a");
  get("b");
  export_kernels(archive());
  const std::string sound = testing::read_bytes(archive());
  const std::string second_half = sound.substr(sound.rfind("qkv kernel 1\n"));
  std::string flipped = sound;
  flipped[flipped.size() - 3] ^= 4;
  use(root + "/other");
  for (const std::string& bytes : {flipped, sound.substr(0, sound.size() - 1), std::string("PK"), std::string(),
                                   sound.substr(0, sound.size() - second_half.size())}) {
    testing::write_bytes(archive(), bytes);
    const Error error = error_of([&] { import_kernels(archive()); });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_EQ(error.argument(), archive());
    EXPECT_TRUE(files().empty());
  }
}

TEST_F(KernelCache, archive_cut_between_two_entries_is_refused) {
  get("a");
  export_kernels(archive());
  std::string bytes = testing::read_bytes(archive());
  bytes.replace(bytes.find("\n1\n1"), 4, "\n1\n2");
  testing::write_bytes(archive(), bytes);
  EXPECT_EQ(error_of([&] { import_kernels(archive()); }).value(), "it is cut off after 1 kernels");
}

TEST_F(KernelCache, files_that_cannot_be_read_or_written_are_errors) {
  EXPECT_EQ(error_of([&] { import_kernels(root + "/none"); }).value(), "no such file");
  testing::write_bytes(root + "/file", "");
  EXPECT_EQ(error_of([&] { export_kernels(root + "/file/archive"); }).code(), ErrorCode::unavailable);
  get("a");
  export_kernels(archive());
  use(root + "/file/cache");
  EXPECT_EQ(error_of([&] { import_kernels(archive()); }).argument(), "kernel cache");
}

}  // namespace
}  // namespace qkv
