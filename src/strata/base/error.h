// Errors of the engine. A fault of the user or of the machine throws one of these classes; the
// message names the wanted and the found value and the remedy, with the run-time values at its end.
// STRATA_ASSERT checks conditions that only a bug of Strata can break. It stays on in every build
// and throws InternalError: an engine that trains for weeks must not abort the process that holds
// the user's state.
#pragma once

#include <fmt/core.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace strata {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  // Formats the message of its values.
  template <typename... Values>
  requires(sizeof...(Values) > 0) explicit Error(fmt::format_string<Values...> message,
                                                 Values&&... values)
      : std::runtime_error(fmt::format(message, std::forward<Values>(values)...)) {}
};

// The configuration is wrong or asks for what is not supported; names the JSON path.
struct ConfigError : Error {
  using Error::Error;
};

// A file's content is not what its format says, or does not fit the model.
struct FormatError : Error {
  using Error::Error;
};

// A read or write failed; names path, offset, wanted and got bytes, errno.
struct IoError : Error {
  using Error::Error;
};

// Ranks disagree, or one of them is gone; names the ranks.
struct CommError : Error {
  using Error::Error;
};

// Memory of a tier does not suffice; says how much of it is held by what.
struct OutOfMemoryError : Error {
  using Error::Error;
};

// A device's driver refused a call; says which, and what the driver said.
struct DeviceError : Error {
  using Error::Error;
};

// The engine was called in an order or with values that its contract forbids.
struct UsageError : Error {
  using Error::Error;
};

// Values that training cannot use: gradients that are not finite.
struct NumericsError : Error {
  using Error::Error;
};

// A bug in Strata itself.
struct InternalError : Error {
  using Error::Error;
};

// "errno=28 (No space left on device)": its number and the system's words for it, for messages.
std::string errno_text(int code);

// The first error of several parts that all have to run, even if one of them fails, such as the
// steps that drop a failed pass. The first error is the cause; later ones are mostly its
// consequence. Threads: one at a time.
class FirstError {
 public:
  // Runs `part`, and keeps its exception if none was kept before.
  template <typename Part>
  void attempt(Part&& part) noexcept {
    try {
      std::forward<Part>(part)();
    } catch (...) {
      keep(std::current_exception());
    }
  }
  void keep(std::exception_ptr error) noexcept {
    if (error_ == nullptr) error_ = std::move(error);
  }
  const std::exception_ptr& get() const noexcept { return error_; }  // null: nothing failed

  // Throws the kept error, if there is one, at every call.
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }
  // Throws what was kept, and forgets it.
  void rethrow_once() {
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::exception_ptr error_;
};

[[noreturn]] void throw_assert_failed(const char* expression, const char* file, int line);

}  // namespace strata

#define STRATA_ASSERT(condition)                                                     \
  do {                                                                               \
    if (!(condition)) ::strata::throw_assert_failed(#condition, __FILE__, __LINE__); \
  } while (false)
