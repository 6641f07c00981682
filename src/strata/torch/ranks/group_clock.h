// Measures when operations of a c10d backend ran, by the device's clock. Only the backend can reach
// the streams on which it queues them. So a separate stream waits for the same events and records
// the times: an operation begins when its contribution is ready and the operations before it have
// ended.
// Threads: those of the Collectives. Ownership: borrows the device. Errors: DeviceError.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "strata/device/device.h"

namespace strata::torch {

class GroupClock {
 public:
  // `device`: of `place`; its compute stream is torch's current one.
  GroupClock(c10::Device place, device::Device& device) : place_(place), device_(device) {}

  // Records the time at which all work on the current stream, and everything marked before, is
  // done.
  std::shared_ptr<device::TimedEvent> mark_after_compute();
  std::shared_ptr<device::TimedEvent> mark_after(c10d::Work& work);

 private:
  c10::Stream stream();

  c10::Device place_;
  device::Device& device_;
  std::optional<c10::Stream> stream_;  // taken at the first mark
};

}  // namespace strata::torch
