// cuBLAS is opened where there is one, and its absence is an error that says what to do. No GPU is needed.
#include "cuda/cublas.hpp"

#include <gtest/gtest.h>

#include "jit/nvrtc_library.hpp"
#include "qkv/status.hpp"

namespace qkv::cuda {
namespace {

TEST(cublas, is_opened_whole_or_refused_by_name) {
  try {
    const Cublas& found = cublas();
    EXPECT_NE(found.path.find("cublas"), std::string::npos);
    EXPECT_TRUE(found.create != nullptr && found.destroy != nullptr && found.set_stream != nullptr &&
                found.gemm_strided_batched != nullptr);
    EXPECT_EQ(&cublas(), &found);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    EXPECT_EQ(error.argument(), "libcublas");
    EXPECT_NE(error.allowed().find("nvidia-cublas"), std::string::npos);
  }
}

TEST(cublas, is_looked_for_in_the_folder_of_its_own_wheel) {
  jit::Surroundings around;
  around.own_folder = "/env/lib/python3.12/site-packages/qkv";
  bool found = false;
  for (const jit::SearchPlace& place : jit::search_places(around, "nvidia/cublas/lib")) {
    found = found || place.folder == "/env/lib/python3.12/site-packages/nvidia/cublas/lib";
    EXPECT_EQ(place.folder.find("cuda_nvrtc"), std::string::npos);
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace qkv::cuda
