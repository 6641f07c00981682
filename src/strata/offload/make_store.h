// Makes the StateStores of a rank, each for a place. Threads: one. Ownership: the device outlives
// what is made. Errors: IoError for a folder that will not do; OutOfMemoryError.
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

struct MadeStores {
  std::shared_ptr<StateStore> states;
  std::shared_ptr<StateStore> weights;
  std::string remark;  // what users should be told once; empty: nothing
};

// Those that use a drive stage through one arena, which has the budgets of both: what one of them
// does not need is the other's.
MadeStores make_stores(const StatePlace& states, const StatePlace& weights, device::Device& device,
                       int rank);

// For a device that computes nothing: the same memory, and no drive is touched.
MadeStores make_dry_stores(const StatePlace& states, const StatePlace& weights,
                           device::Device& device);

}  // namespace strata::offload
