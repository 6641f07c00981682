// The backend of a c10d process group, as collectives use it until let_go(). A backend's threads
// release tensors, and may need Python's lock for that. So they must end before the interpreter
// does, even if collectives, and an engine that holds them, live longer. The caller that ends the
// interpreter calls let_go() before. The threads end with the last reference to the backend, which
// the process group may hold.
// Threads: one thread a rank; let_go() waits for the backend's, so without Python's lock.
// Errors: get() throws CommError once the backend has gone.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "strata/base/error.h"

namespace strata::torch {

class GroupBackend {
 public:
  explicit GroupBackend(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}

  c10d::Backend& get() const {
    if (backend_) return *backend_;
    throw CommError(
        "these collectives have let their process group go, since their engine was destroyed or "
        "the program ends; call initialize() again to go on");
  }
  // Waits for the operations that this rank has started.
  void let_go() noexcept { backend_.reset(); }

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;  // null: let go
};

// The backends of one Collectives, which owns them.
class UsedBackends {
 public:
  void add(const std::shared_ptr<GroupBackend>& backend) { backends_.push_back(backend); }
  // Whether living collectives use one of them.
  bool in_use() const {
    for (const auto& backend : backends_) {
      if (!backend.expired()) return true;
    }
    return false;
  }
  void let_go() noexcept {
    for (const auto& backend : std::exchange(backends_, {})) {
      if (const auto used = backend.lock()) used->let_go();
    }
  }

 private:
  std::vector<std::weak_ptr<GroupBackend>> backends_;
};

}  // namespace strata::torch
