// Host memory that kernels of a device work on, in place. Charged to the host tier. Threads,
// ownership: as for Device::allocate_host(). Errors: OutOfMemoryError, also if the system does not
// let this process pin as much.
#pragma once

#include <memory>

#include "strata/device/device.h"

namespace strata::offload {

std::unique_ptr<device::HostMemory> pinned_memory(device::Device& device, Bytes bytes,
                                                  memory::Kind kind);

}  // namespace strata::offload
