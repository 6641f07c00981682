// An operation of a c10d backend as a Work of the Collectives interface. wait() also runs the
// function that finishes the result. On a GPU wait() makes the current stream wait, and queues that
// function's work behind it; the host goes on. Threads: those of the Collectives that made it.
// Errors: wait() calls `fail` with the backend's error and throws its exception, the same one at
// each call; the destructor waits and drops errors.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "strata/comm/collectives.h"

namespace strata::torch {

class GroupWork final : public comm::Work {
 public:
  // Turns the backend's error into the group's own CommError, and throws it.
  using Fail = std::function<void(const std::string&)>;

  // Complete from the start: there was nothing to do, or it is done.
  GroupWork() = default;
  // `finish` may be null.
  GroupWork(c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish, Fail fail);
  ~GroupWork() override;

  bool done() override;
  void wait() override;
  void set_times(comm::WorkTimes times) { times_ = std::move(times); }
  comm::WorkTimes times() const override { return times_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::function<void()> finish_;
  Fail fail_;
  std::optional<std::string> failure_;
  comm::WorkTimes times_;
};

}  // namespace strata::torch
