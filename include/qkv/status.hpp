// The one way in which the library reports a failure: an exception with a code, the argument's name, the value that
// was given, and what is allowed. Nothing has been launched or written when it is thrown.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "qkv/export.hpp"

namespace qkv {

enum class ErrorCode {
  invalid_argument,  // a value that no call accepts: a NaN scale, offsets that decrease, a slot outside the cache
  mismatch,          // two arguments that do not belong together: a plan of another layer, a cache of another head size
  unsupported,       // a sensible request that this build or device does not do; explain() says so beforehand
  unavailable,       // a device, library or file that is not there
  internal,          // a broken invariant of the library: please report it
};

QKV_EXPORT std::string_view to_string(ErrorCode code);

class QKV_EXPORT Error : public std::runtime_error {
 public:
  // what() reads "argument: got VALUE; allowed: ALLOWED" on one line. `allowed` also says what to do, where that helps.
  Error(ErrorCode code, std::string argument, std::string value, std::string allowed);

  ErrorCode code() const { return code_; }
  const std::string& argument() const { return argument_; }
  const std::string& value() const { return value_; }
  const std::string& allowed() const { return allowed_; }

 private:
  ErrorCode code_;
  std::string argument_;
  std::string value_;
  std::string allowed_;
};

}  // namespace qkv
