// Where NVRTC is looked for, in which order, and what is said when it is not found.
#include "jit/nvrtc_library.hpp"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "qkv/status.hpp"

namespace qkv {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// A folder that stands for a machine.
class NvrtcLibrary : public testing::Test {
 protected:
  ~NvrtcLibrary() override { fs::remove_all(root_); }

  std::string folder(const std::string& name) const {
    fs::create_directories(root_ / name);
    return (root_ / name).string();
  }
  std::string file(const std::string& name, const std::string& text) const {
    folder(fs::path(name).parent_path().string());
    std::ofstream(root_ / name) << text;
    return (root_ / name).string();
  }
  std::vector<std::string> folders(const jit::Surroundings& around) const {
    std::vector<std::string> found;
    for (const auto& place : jit::search_places(around)) found.push_back(place.folder);
    return found;
  }

  const fs::path root_ = fs::temp_directory_path() / ("qkv_nvrtc_" + std::to_string(getpid()));
};

template <class Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    return error.what();
  }
  return "nothing was thrown";
}

TEST_F(NvrtcLibrary, searched_in_the_documented_order) {
  jit::Surroundings around;
  around.cuda_home = folder("toolkit");
  around.own_folder = folder("lib/python3.12/site-packages/qkv");
  around.virtual_env = folder("env");
  around.working_folder = folder("work");
  const std::string env = folder("env/lib/python3.11/site-packages");
  const std::string work = folder("work/.venv/lib/python3.13/site-packages");
  const std::string beside = folder("lib/python3.12/site-packages");
  EXPECT_THAT(folders(around), testing::ElementsAre("", *around.cuda_home + "/lib64", *around.cuda_home + "/lib",
                                                    "/usr/local/cuda/lib64",  //
                                                    beside + "/nvidia/cu13/lib", beside + "/nvidia/cuda_nvrtc/lib",
                                                    env + "/nvidia/cu13/lib", env + "/nvidia/cuda_nvrtc/lib",
                                                    work + "/nvidia/cu13/lib", work + "/nvidia/cuda_nvrtc/lib"));
}

TEST_F(NvrtcLibrary, only_loader_and_usual_toolkit_without_surroundings) {
  jit::Surroundings around;
  around.own_folder = "/usr/lib/x86_64-linux-gnu";
  around.virtual_env = "/nowhere";
  around.working_folder = root_.string();
  EXPECT_THAT(folders(around), testing::ElementsAre("", "/usr/local/cuda/lib64"));
}

TEST_F(NvrtcLibrary, surroundings_are_those_of_the_process) {
  const auto* before = std::getenv("CUDA_HOME");
  const std::string kept = before == nullptr ? "" : before;
  setenv("CUDA_HOME", "/a/toolkit", 1);
  const jit::Surroundings around = jit::surroundings();
  before == nullptr ? unsetenv("CUDA_HOME") : setenv("CUDA_HOME", kept.c_str(), 1);
  EXPECT_EQ(around.cuda_home, "/a/toolkit");
  EXPECT_EQ(around.working_folder, fs::current_path().string());
  EXPECT_TRUE(fs::is_directory(around.own_folder));
}

TEST_F(NvrtcLibrary, named_file_that_is_missing_ends_the_search) {
  jit::Surroundings around = jit::surroundings();
  around.named_file = "/nowhere/libnvrtc.so.13";
  const std::string message = message_of([&] { jit::open_nvrtc(around); });
  EXPECT_THAT(message, HasSubstr("QKV_NVRTC: got /nowhere/libnvrtc.so.13 (/nowhere/libnvrtc.so.13: not found)"));
  EXPECT_THAT(message, HasSubstr("allowed: NVRTC 12.3 or later: pip install nvidia-cuda-nvrtc"));
}

TEST_F(NvrtcLibrary, named_file_that_is_no_library_is_told_with_the_reason) {
  jit::Surroundings around;
  around.named_file = file("libnvrtc.so.13", "text");
  EXPECT_THAT(message_of([&] { jit::open_nvrtc(around); }), HasSubstr("file too short"));
  around.named_file = "libc.so.6";
  EXPECT_THAT(message_of([&] { jit::open_nvrtc(around); }), HasSubstr("libc.so.6: has no nvrtcGetErrorString"));
}

TEST_F(NvrtcLibrary, nowhere_found_lists_what_was_searched_and_why_not_taken) {
  const std::string broken = fs::path(file("broken/libnvrtc.so.13", "text")).parent_path();
  const std::string message = message_of([&] { jit::open_nvrtc_in({{broken, "first"}, {"/nowhere", "second"}}); });
  EXPECT_THAT(message, HasSubstr("libnvrtc: got none in " + broken + ", /nowhere (" + broken));
  EXPECT_THAT(message, HasSubstr("file too short"));
}

TEST_F(NvrtcLibrary, versions_before_12_3_are_too_old) {
  EXPECT_TRUE(jit::is_supported_version(12, 3));
  EXPECT_TRUE(jit::is_supported_version(13, 0));
  EXPECT_FALSE(jit::is_supported_version(12, 2));
  EXPECT_FALSE(jit::is_supported_version(11, 8));
}

TEST_F(NvrtcLibrary, old_one_is_passed_over_and_told) {
  jit::Surroundings around;
  around.named_file = QKV_OLD_NVRTC;
  const std::string message = message_of([&] { jit::open_nvrtc(around); });
  EXPECT_THAT(message, HasSubstr("version 11.8 is too old"));
  EXPECT_THAT(message, HasSubstr("allowed: NVRTC 12.3 or later"));
}

// Tests of what is found link the real library into places where it may lie.
class FoundNvrtc : public NvrtcLibrary {
 protected:
  void SetUp() override {
    if (const jit::Probe probe = jit::probe_nvrtc(); !probe.usable) GTEST_SKIP() << "needs NVRTC: " << probe.text;
  }
  std::string link(const std::string& name) const {
    folder(fs::path(name).parent_path().string());
    fs::create_symlink(jit::nvrtc().path, root_ / name);
    return (root_ / name).string();
  }
};

TEST_F(FoundNvrtc, named_file_goes_before_everything) {
  jit::Surroundings around = jit::surroundings();
  around.named_file = link("my_nvrtc.so");
  EXPECT_EQ(jit::open_nvrtc(around).origin, "QKV_NVRTC");
}

TEST_F(FoundNvrtc, broken_file_does_not_end_the_search) {
  const std::string broken = fs::path(file("broken/libnvrtc.so.13", "text")).parent_path();
  const std::string whole = fs::path(link("whole/libnvrtc.so.12")).parent_path();
  EXPECT_EQ(jit::open_nvrtc_in({{broken, "the first"}, {whole, "the second"}}).origin, "the second");
}

TEST_F(FoundNvrtc, wheel_in_the_working_folders_environment_is_found) {
  link(".venv/lib/python3.11/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  jit::Surroundings around;
  around.working_folder = root_.string();
  auto places = jit::search_places(around);
  places.erase(places.begin(), places.begin() + 2);  // where this machine's own may be
  EXPECT_EQ(jit::open_nvrtc_in(places).origin, ".venv of the working folder");
}

TEST_F(FoundNvrtc, probe_tells_version_place_and_why) {
  const jit::Nvrtc& found = jit::nvrtc();
  const std::string text = jit::probe_nvrtc().text;
  EXPECT_THAT(text, HasSubstr(std::to_string(found.major) + "." + std::to_string(found.minor) + " at /"));
  EXPECT_THAT(text, HasSubstr("(" + found.origin + ")"));
}

}  // namespace
}  // namespace qkv
