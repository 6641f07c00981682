// What a script does, on this rank, to the gradients that a step has collected so far: drops all of
// them or those of one parameter, or puts others in their place. Reduced ones and ones that wait
// for a reduction go alike. The step then updates with what is left, and leaves alone the
// parameters that no rank has a gradient of.
//
// Nothing here waits for other ranks. A rank that drops what was reduced already has to have all
// others do the same: the next step finds out (GradientRecord::dropped()).
//
// Threads: one thread at a time, between backward passes. Ownership: borrows all. Errors:
// OutOfMemoryError, DeviceError.
#pragma once

#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/engine/reduce/gradient_record.h"
#include "strata/engine/reduce/gradient_shards.h"
#include "strata/engine/reduce/gradient_writes.h"

namespace strata::engine {

class GradientEdits {
 public:
  GradientEdits(const std::vector<Unit>& units, const comm::Collectives& collectives,
                device::Device& device, GradientShards& shards, GradientWrites& writes,
                GradientRecord& record)
      : units_(units),
        collectives_(collectives),
        device_(device),
        shards_(shards),
        writes_(writes),
        record_(record) {}

  // Nothing was collected: costs nothing.
  void drop_all();
  // `came`: it still counts as one that got a gradient, of zeroes.
  void drop(int unit, int slot, bool came);
  // What this rank owns of the parameter has these fp32 values as its gradient; null where it owns
  // none. The compute stream reads them.
  void store(int unit, int slot, const float* values);

 private:
  void write(int unit, int slot, const float* values);

  const std::vector<Unit>& units_;
  const comm::Collectives& collectives_;
  device::Device& device_;
  GradientShards& shards_;
  GradientWrites& writes_;
  GradientRecord& record_;
};

}  // namespace strata::engine
