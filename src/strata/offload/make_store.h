// Makes StateStores: those of a rank, each for a placement, and those that one tier needs. Threads:
// one. Ownership: the device outlives the stores. Errors: IoError for an unusable folder;
// OutOfMemoryError.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "strata/device/device.h"
#include "strata/io/io_engine.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

// The placement of optimizer states between steps.
struct StatePlacement {
  memory::Tier tier = memory::Tier::kDevice;  // of blocks that name none
  std::vector<memory::Tier> others;           // that blocks name
  // For drives: existing folders, one on each drive, and the bytes of host memory to stage through.
  std::vector<std::string> folders;
  Bytes budget;
  io::EngineOptions io = {};
  bool verify = false;  // checksums of what is written and read
  Bytes asked{};        // of the budget, where more is taken

  bool uses(memory::Tier wanted) const {
    return tier == wanted || std::ranges::find(others, wanted) != others.end();
  }
  bool offloads() const { return uses(memory::Tier::kHost) || uses(memory::Tier::kNvme); }
};

struct MadeStores {
  std::shared_ptr<StateStore> states;
  std::shared_ptr<StateStore> weights;
  std::string warning;  // what users should be told once; empty: nothing
};

// Stores that use a drive stage through one arena, with the sum of their budgets: each may use the
// room that the other does not need.
MadeStores make_stores(const StatePlacement& states, const StatePlacement& weights,
                       device::Device& device, int rank);

// StateStore in memory: a lease is the part of the block itself. Blocks that one add_all() added
// lie in one buffer, each at a multiple of 64 bytes; the buffer is charged. One class serves the
// device and the host tier; only the allocation differs. A device's host memory is pinned, so that
// its kernels read and write a lease in place, over the link, in the order of their stream.
// Ownership: the store owns the buffers; a lease keeps its own alive. Errors: OutOfMemoryError from
// add_all(), also if the system does not let host memory be pinned; UsageError for a part that does
// not exist, is leased already or is offloaded.
//
// `tier`: that of the device or the host. `device` outlives the store and its leases. Its kernels
// work on leases, and its ledger is charged.
std::unique_ptr<StateStore> make_memory_store(memory::Tier tier, device::Device& device);

// A StateStore over several tiers: each block rests in the tier that it names (BlockSpec::tier), or
// else in the first. Parts of several tiers may be fetched together; the rules about room apply to
// each tier by itself. At least one store; each has a tier of its own.
std::shared_ptr<StateStore> make_tiered_store(std::vector<std::shared_ptr<StateStore>> stores);

// For a forecast's device, which computes nothing: the stores hold the same memory, and touch no
// drive.
MadeStores make_dry_stores(const StatePlacement& states, const StatePlacement& weights,
                           device::Device& device);

}  // namespace strata::offload
