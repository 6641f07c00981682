// What device memory held while it is away: a copy in host memory, from offload_states() of a
// script to its reload_states(). Charged to the host tier. Threads: one at a time. Ownership: keeps
// its memory; the device outlives it. Work that is queued on the compute stream uses it: who
// destroys it waits for that first. Errors: OutOfMemoryError from construction.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "strata/device/device.h"

namespace strata::offload {

class ParkedCopy {
 public:
  // `pinned`: in pinned memory, as far as the system lets this process pin some.
  ParkedCopy(device::Device& device, Bytes bytes, memory::Kind kind, bool pinned);

  // Queue on the compute stream, of memory of so many bytes.
  void take(std::span<const std::byte> source);
  void give_back(std::span<std::byte> target);

 private:
  device::Device& device_;
  std::unique_ptr<device::Memory> memory_;
};

// UsageError: `what` is away.
[[noreturn]] void throw_parked(std::string_view what);

}  // namespace strata::offload
