// Host memory for a device: memory that its kernels work on in place, and copies of device memory
// while that is freed, from a script's offload_states() to its reload_states(). Both are charged to
// the host tier.
//
// Threads: one at a time. Ownership: as for Device::allocate_host(); the device outlives an
// OffloadedCopy. Errors: OutOfMemoryError, for pinned_memory() also if the system does not let this
// process pin as much.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "strata/device/device.h"

namespace strata::offload {

std::unique_ptr<device::HostMemory> pinned_memory(device::Device& device, Bytes bytes,
                                                  memory::Kind kind);

// The content of device memory, on the host.
using OffloadedCopy = device::Memory;

// Device memory and the place of its copy.
struct OffloadedMemory {
  std::span<std::byte> bytes;
  std::unique_ptr<OffloadedCopy>* copy = nullptr;
};
// Copies all of them to the host, and waits for the copies. If it throws, no copy has changed.
// `pinned`: uses pinned memory as far as the system lets this process pin it.
void offload_all(device::Device& device, std::span<const OffloadedMemory> memory, memory::Kind kind,
                 bool pinned);
// Copies the content back, waits for that, and frees the copy.
void reload(device::Device& device, std::unique_ptr<OffloadedCopy>& copy,
            std::span<std::byte> target);

// Throws the UsageError which says that `what` is offloaded.
[[noreturn]] void throw_offloaded(std::string_view what);

}  // namespace strata::offload
