// The content of device memory while that memory is freed: a copy on the host, from a script's
// offload_states() to its reload_states(). Charged to the host tier. Threads: one at a time.
// Ownership: owns its memory; the device outlives it. Work on the compute stream uses the copy, so
// its owner waits for that work before it destroys the copy. Errors: OutOfMemoryError from
// construction.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "strata/device/device.h"

namespace strata::offload {

class OffloadedCopy {
 public:
  // `pinned`: uses pinned memory as far as the system lets this process pin it.
  OffloadedCopy(device::Device& device, Bytes bytes, memory::Kind kind, bool pinned);

  // These queue the copy on the compute stream. `source` and `target` have the size of the copy.
  void take(std::span<const std::byte> source);
  void give_back(std::span<std::byte> target);

 private:
  device::Device& device_;
  std::unique_ptr<device::Memory> memory_;
};

// Throws the UsageError which says that `what` is offloaded.
[[noreturn]] void throw_offloaded(std::string_view what);

}  // namespace strata::offload
