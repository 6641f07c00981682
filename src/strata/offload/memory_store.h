// StateStore in memory: a lease is the part of the block itself. Blocks that one add_all() added
// lie in one buffer, each at a multiple of 64 bytes; the buffer is charged. One class serves the
// device and the host tier; only the allocation differs. A device's host memory is pinned, so that
// its kernels read and write a lease in place, over the link, in the order of their stream.
// Threads: one at a time. Ownership: the store owns the buffers; a lease keeps its own alive.
// Errors: OutOfMemoryError from add_all(), also if the system does not let host memory be pinned;
// UsageError for a part that does not exist, is leased already or is offloaded.
#pragma once

#include <memory>

#include "strata/device/device.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

// `tier`: that of the device or the host. `device` outlives the store and its leases. Its kernels
// work on leases, and its ledger is charged.
std::unique_ptr<StateStore> make_memory_store(memory::Tier tier, device::Device& device);

}  // namespace strata::offload
