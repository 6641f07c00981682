#include "strata/torch/ranks/group_work.h"

#include <utility>

#include "strata/base/error.h"

namespace strata::torch {

GroupWork::GroupWork(c10::intrusive_ptr<c10d::Work> work, std::function<void()> finish, Fail fail)
    : work_(std::move(work)), finish_(std::move(finish)), fail_(std::move(fail)) {}

GroupWork::~GroupWork() {
  try {
    GroupWork::wait();
  } catch (const std::exception&) {
    return;  // a caller that wants the error calls wait()
  }
}

bool GroupWork::done() {
  return !work_ || work_->isCompleted();
}

void GroupWork::wait() {
  if (failure_.has_value()) throw CommError(*failure_);
  if (!work_) return;
  const auto work = std::exchange(work_, nullptr);
  try {
    work->wait();
    if (finish_) finish_();
  } catch (const std::exception& error) {
    try {
      fail_(error.what());
    } catch (const CommError& explained) {
      failure_ = explained.what();
      throw;
    }
  }
}

}  // namespace strata::torch
