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
  // Collective: reduces what still waits for it, and brings every trainable unit together, but
  // tiles. `take` may be empty: others want them.
  void gather(const Take& take);
  // The same of one unit, on the only rank; takes nothing where there is no gradient of it.
  void take_shard(int unit, const Take& take);

 private:
  Reducer& reducer_;
  const std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
};

}  // namespace strata::engine
