// When operations of a c10d backend ran, by the device's clock. The backend queues them on streams
// that nobody else reaches, so a stream beside waits for what they wait for, and is marked there:
// begin is when the contribution was ready and operations before it were over.
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

  // When all that the current stream holds is done, and what was marked before.
  std::shared_ptr<device::TimedEvent> mark_after_compute();
  std::shared_ptr<device::TimedEvent> mark_after(c10d::Work& work);

 private:
  c10::Stream stream();

  c10::Device place_;
  device::Device& device_;
  std::optional<c10::Stream> stream_;  // taken at the first mark
};

}  // namespace strata::torch
