#include "strata/engine/reduce/reductions_in_flight.h"

#include <algorithm>
#include <utility>

namespace strata::engine {
namespace {

Bytes bytes_of_buffer(const GradientBuffers::Buffer& buffer) {
  return buffer == nullptr ? Bytes() : Bytes(buffer->memory->local().size());
}

}  // namespace

void ReductionsInFlight::add(int unit, GradientBuffers::Buffer buffer,
                             std::unique_ptr<comm::Work> work, StepRecorder::Recording recording) {
  held_ += bytes_of_buffer(buffer);
  pending_.push_back({unit, std::move(buffer), std::move(work), std::move(recording)});
}

void ReductionsInFlight::progress() {
  if (!pending_.empty()) pending_.back().work->done();
}

void ReductionsInFlight::free_buffers(Bytes at_most) {
  for (Pending& pending : pending_) {
    if (held_ <= at_most) break;
    if (pending.buffer == nullptr) continue;
    recorder_.measure(Activity::kReduceWait, pending.unit,
                      [&] { pending.work->wait_for_readers(); });
    held_ -= bytes_of_buffer(pending.buffer);
    buffers_.give_back(std::move(pending.buffer));
  }
  while (!pending_.empty() && pending_.front().buffer == nullptr && pending_.front().work->done())
    settle_front();
}

void ReductionsInFlight::settle_front() {
  Pending& pending = pending_.front();
  recorder_.measure(Activity::kReduceWait, pending.unit, [&] { pending.work->wait(); });
  recorder_.end(pending.recording);
  shards_.settle(pending.unit);
  pending_.pop_front();
}

void ReductionsInFlight::finish(int unit) {
  const auto last = std::find_if(pending_.rbegin(), pending_.rend(),
                                 [unit](const Pending& pending) { return pending.unit == unit; });
  for (auto left = pending_.rend() - last; left > 0; --left) {
    Pending& pending = pending_.front();
    if (pending.buffer != nullptr) {
      recorder_.measure(Activity::kReduceWait, pending.unit,
                        [&] { pending.work->wait_for_readers(); });
      held_ -= bytes_of_buffer(pending.buffer);
      buffers_.give_back(std::move(pending.buffer));
    }
    settle_front();
  }
}

void ReductionsInFlight::finish() {
  free_buffers(Bytes());
  while (!pending_.empty()) settle_front();
}

void ReductionsInFlight::abandon() {
  for (Pending& pending : pending_) {
    pending.work.reset();  // waits, drops its error
    buffers_.give_back(std::move(pending.buffer));
  }
  pending_.clear();
  held_ = Bytes();
}

}  // namespace strata::engine
