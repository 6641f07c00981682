// A script's edits, on this rank, to the gradients that a step has collected so far: it drops all
// of them or those of one parameter, or puts others in their place. This includes reduced gradients
// and those that wait for a reduction. The step then updates with the gradients that are left, and
// leaves parameters without a gradient on any rank unchanged.
//
// No edit waits for other ranks. If a rank drops reduced gradients, all others have to drop the
// same ones: the next step checks that (GradientRecord::dropped()).
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
  // Sets this rank's part of the parameter's gradient to these fp32 values; null if this rank owns
  // no part. The compute stream reads the values.
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
