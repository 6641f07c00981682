// The global norm of a step's gradients, computed by the device without a host wait: sums of
// squares by unit, the totals of all ranks, and the factor by which the update multiplies its
// gradients. The update reads the factor from the device's memory when it runs. Gradients that are
// not finite make the factor NaN: the update then changes nothing, and finish() reports it, as late
// as the caller asks.
//
// Threads: one thread at a time. Errors: CommError from the collectives; OutOfMemoryError.
#pragma once

#include <memory>
#include <span>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/reduce/gradient_shards.h"

namespace strata::engine {

class GradientNorm {
 public:
  GradientNorm(comm::Collectives& collectives, device::Device& device, GradientShards& shards)
      : collectives_(collectives), device_(device), shards_(shards) {}

  // Whether begin() can be used at all; the same on every rank.
  bool available() const;
  // Collective: queues the computation for the filled shards, on the compute stream; the shards of
  // any rank may change in that stream afterwards. finish() before the next one.
  void begin(double loss_scale, double clipping);
  // In memory of the device; of the last begin().
  const float* factor() const { return &values().result->factor; }
  bool begun() const { return computed_ != nullptr; }

  struct Finding {
    double norm = 0.0;
    bool finite = true;
  };
  // The finding that begin() queued; waits for the device.
  Finding finish();
  // A unit of which this rank's gradients were not finite; -1: none. After finish().
  int first_not_finite();

 private:
  // Parts of `memory_`.
  struct Values {
    std::span<double> by_unit;
    std::span<double> by_rank;
    kernels::GradientFactor* mine = nullptr;
    kernels::GradientFactor* result = nullptr;
  };
  Values values() const;

  comm::Collectives& collectives_;
  device::Device& device_;
  GradientShards& shards_;
  std::unique_ptr<device::Memory> memory_;    // null: none yet
  std::unique_ptr<device::HostMemory> host_;  // the result; null: none yet
  double loss_scale_ = 1.0;
  std::unique_ptr<device::Event> computed_;  // null: nothing is begun
};

}  // namespace strata::engine
