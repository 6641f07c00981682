// The first exception of several steps that all have to run, whatever happens to one of them: what
// came first is the cause, what follows it is mostly its consequence. Threads: one at a time.
#pragma once

#include <exception>
#include <utility>

namespace strata::torch {

class FirstError {
 public:
  // Runs `step`, and keeps what it throws if nothing was kept before.
  template <typename Step>
  void attempt(Step&& step) noexcept {
    try {
      std::forward<Step>(step)();
    } catch (...) {
      if (error_ == nullptr) error_ = std::current_exception();
    }
  }

  // Throws what was kept, as often as it is called.
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

}  // namespace strata::torch
