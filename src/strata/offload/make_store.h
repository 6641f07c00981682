// Makes the StateStore for a place. Threads: one. Ownership: the device outlives what is made.
// Errors: IoError for a folder that will not do; OutOfMemoryError.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "strata/device/device.h"
#include "strata/io/engine_choice.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

// Where optimizer states rest between steps.
struct StatePlace {
  memory::Tier tier = memory::Tier::kDevice;  // of blocks that name none
  std::vector<memory::Tier> others;           // that blocks name
  // On drives: folders that exist, one on each, and the bytes of host memory to stage through.
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

struct MadeStore {
  std::shared_ptr<StateStore> store;
  std::string remark;  // what users should be told once; empty: nothing
};

MadeStore make_state_store(const StatePlace& place, device::Device& device, int rank);

// For a device that computes nothing: the same memory, and no drive is touched.
std::shared_ptr<StateStore> make_dry_store(const StatePlace& place, device::Device& device);

}  // namespace strata::offload
