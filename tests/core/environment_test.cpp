// QKV_CHECK is 0 or 1; what is neither is refused.
#include "core/environment.hpp"

#include <gtest/gtest.h>

#include <cstdlib>

#include "qkv/status.hpp"

namespace qkv {
namespace {

class checked_mode : public ::testing::Test {
 protected:
  ~checked_mode() override { kept_ ? setenv("QKV_CHECK", kept_->c_str(), 1) : unsetenv("QKV_CHECK"); }

 private:
  const std::optional<std::string> kept_ = environment("QKV_CHECK");
};

TEST_F(checked_mode, is_off_unless_asked_for) {
  unsetenv("QKV_CHECK");
  EXPECT_FALSE(is_checked_mode());
  for (const char* value : {"", "0"}) {
    setenv("QKV_CHECK", value, 1);
    EXPECT_FALSE(is_checked_mode());
  }
  setenv("QKV_CHECK", "1", 1);
  EXPECT_TRUE(is_checked_mode());
}

TEST_F(checked_mode, other_values_are_refused) {
  setenv("QKV_CHECK", "yes", 1);
  try {
    is_checked_mode();
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "QKV_CHECK: got yes; allowed: 1 (check), or 0 or nothing (do not)");
  }
}

}  // namespace
}  // namespace qkv
