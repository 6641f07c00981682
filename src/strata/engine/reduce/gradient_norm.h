// The global norm of a step's gradients, computed by the device without a host wait, and the factor
// by which the update multiplies its gradients. The update reads the factor from the device's
// memory when it runs. Gradients that are not finite make the factor NaN: the update then changes
// nothing, and finish() reports it.
//
// Threads: one thread at a time. Ownership: borrows all. Errors: CommError from the collectives;
// OutOfMemoryError; DeviceError.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/reduce/gradient_shards.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

// Many small counts in few doubles, so that one sum of doubles over all ranks adds up each of them,
// exactly. Pure arithmetic, immutable.
class PackedCounts {
 public:
  // `most`: no count exceeds it in the sum; from 1.
  PackedCounts(std::size_t counts, int most);

  // 1 each, but 0 for `absent`.
  std::vector<double> ones_without(std::span<const int> absent) const;
  // The counts that are 0 in the sum, in ascending order.
  std::vector<int> zeroes(std::span<const double> sum) const;

 private:
  std::size_t counts_;
  std::size_t bits_;        // of a count
  std::size_t per_double_;  // counts
};

class GradientNorm {
 public:
  GradientNorm(comm::Collectives& collectives, device::Device& device, GradientShards& shards)
      : collectives_(collectives), device_(device), shards_(shards) {}

  // Whether begin() can be used at all; the same on every rank.
  bool available() const {
    return shards_.dtype() == DType::kFloat32 &&
           (collectives_.world_size() == 1 || collectives_.traits().gathers_on_device);
  }
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

// The reduced gradients of a step, whole: gathers all ranks' shards of each unit, one after the
// other, for a script that reads gradients between backward and step.
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
  void take_shard(int unit, const Take& take) {
    reducer_.reduce_late();
    GradientShards& shards = reducer_.shards();
    if (shards.filled(unit)) take(nth(units_, unit), shards.values(unit).data());
  }

 private:
  Reducer& reducer_;
  const std::vector<Unit>& units_;
  comm::Collectives& collectives_;
  device::Device& device_;
};

}  // namespace strata::engine
