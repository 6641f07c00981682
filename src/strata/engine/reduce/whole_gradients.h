// The reduced gradients of a step, whole: gathers all ranks' shards of each unit for a script that
// reads gradients between backward and step. It keeps none of them. A step whose gradients no
// script reads costs nothing here.
//
// Threads: one thread at a time. Ownership: borrows all. Errors: CommError, OutOfMemoryError,
// DeviceError.
#pragma once

#include <functional>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

class WholeGradients {
 public:
  WholeGradients(Reducer& reducer, const std::vector<Unit>& units, comm::Collectives& collectives,
                 device::Device& device)
      : reducer_(reducer), units_(units), collectives_(collectives), device_(device) {}

  // `flat`: fp32 values of the unit's layout, zeroes where no gradient is; readable in the compute
  // stream until this returns.
  using Take = std::function<void(const Unit& unit, const float* flat)>;
  // Collective: reduces the gradients that still wait for it, and gathers every trainable unit
  // except tiles. `take` may be empty: then only other ranks read them.
  void gather(const Take& take);
  // The same for one unit, on the only rank; does not call `take` if the unit has no gradient.
  void take_shard(int unit, const Take& take);

 private:
  Reducer& reducer_;
  const std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
};

}  // namespace strata::engine
