// The first error of several parts that all have to run, even if one of them fails, such as the
// steps that drop a failed pass. The first error is the cause; later ones are mostly its
// consequence. Threads: one at a time.
#pragma once

#include <exception>
#include <utility>

namespace strata {

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

}  // namespace strata
