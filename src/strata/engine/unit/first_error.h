// For what has to be done to its end whatever fails on the way, such as dropping what a failed pass
// left: runs each part, and keeps the first error instead of throwing it. Threads: one.
#pragma once

#include <exception>
#include <utility>

namespace strata::engine {

class FirstError {
 public:
  template <typename Part>
  void keep_of(Part&& part) noexcept {
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
  // Throws what was kept, once.
  void rethrow() {
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  std::exception_ptr error_;
};

}  // namespace strata::engine
