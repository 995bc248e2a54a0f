// Where the plug-in for MPI is looked for, and what is said when there is none that fits.
#include "parallel/mpi_plugin.hpp"

#include <gmock/gmock.h>

#include "qkv/collectives.hpp"
#include "qkv/status.hpp"

namespace qkv {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string refusal(const std::optional<std::string>& named_file, const std::string& folder) {
  try {
    parallel::open_mpi_plugin(named_file, folder);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    return error.what();
  }
  return "nothing was refused";
}

TEST(MpiPlugin, missing_one_is_an_error_that_says_where_it_was_looked_for_and_what_to_install) {
  EXPECT_THAT(refusal({}, "/nowhere"),
              AllOf(HasSubstr("libqkv_mpi.so: got no plug-in that opens (/nowhere/libqkv_mpi.so: not found; "
                              "libqkv_mpi.so: not found)"),
                    HasSubstr("apt-get install openmpi-bin to run, libopenmpi-dev to build")));
}

TEST(MpiPlugin, named_file_is_the_only_one_looked_for) {
  EXPECT_THAT(refusal("/nowhere/own.so", "/elsewhere"),
              HasSubstr("QKV_MPI_LIBRARY: got no plug-in that opens (/nowhere/own.so: not found)"));
}

TEST(MpiPlugin, one_of_another_version_is_refused_by_name) {
  EXPECT_THAT(refusal(QKV_OLD_MPI_PLUGIN, ""),
              HasSubstr("old_mpi_plugin.so: of version 99, where this library needs 1"));
}

TEST(MpiPlugin, library_that_is_no_plug_in_is_refused_by_name) {
  EXPECT_THAT(refusal("libm.so.6", ""), HasSubstr("has no qkv_mpi_table"));
}

TEST(MpiRanks, timeout_must_be_positive) {
  MpiOptions options;
  options.timeout = std::chrono::milliseconds(0);
  EXPECT_THROW(mpi_ranks(options), Error);
}

}  // namespace
}  // namespace qkv
