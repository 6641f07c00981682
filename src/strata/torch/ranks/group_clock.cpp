#include "strata/torch/ranks/group_clock.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace strata::torch {

c10::Stream GroupClock::stream() {
  if (!stream_)
    stream_ = c10::impl::VirtualGuardImpl(place_.type()).getStreamFromGlobalPool(place_);
  return *stream_;
}

std::shared_ptr<device::TimedEvent> GroupClock::mark_after_compute() {
  const auto computed = device_.compute_stream().record();
  const c10::StreamGuard guard(stream());
  device_.compute_stream().wait_for(*computed);
  return device_.compute_stream().record_timed();
}

std::shared_ptr<device::TimedEvent> GroupClock::mark_after(c10d::Work& work) {
  const c10::StreamGuard guard(stream());
  work.wait();
  return device_.compute_stream().record_timed();
}

}  // namespace strata::torch
