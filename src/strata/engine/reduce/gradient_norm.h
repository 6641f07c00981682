// The global norm of a step's gradients, computed by the device without a host wait, and the factor
// by which the update multiplies its gradients. The update reads the factor from the device's
// memory when it runs. Gradients that are not finite make the factor NaN: the update then changes
// nothing, and finish() reports it.
//
// Threads: one thread at a time. Ownership: borrows all. Errors: CommError from the collectives;
// OutOfMemoryError; DeviceError.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/reduce/gradient_shards.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/unit.h"

namespace strata::engine {

class GradientNorm {
  using GradientFactor = kernels::GradientFactor;

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
  void begin(double loss_scale, double clipping) {
    STRATA_ASSERT(available() && !begun());
    loss_scale_ = loss_scale;
    if (memory_ == nullptr) {
      const std::size_t doubles =
          shards_.count() + static_cast<std::size_t>(collectives_.world_size());
      memory_ = device_.allocate(Bytes(2 * sizeof(GradientFactor) + doubles * sizeof(double)),
                                 memory::Kind::kStaging);
      host_ = device_.allocate_host(Bytes(sizeof(GradientFactor)), memory::Kind::kStaging);
    }
    device::Stream& stream = device_.compute_stream();
    const Values v = values();
    // Kept, since the next backward pass writes where the shards have theirs.
    device_.copy(std::as_writable_bytes(v.by_unit), std::as_bytes(shards_.squares()), stream);
    if (collectives_.world_size() == 1) {
      device_.gradient_factor(*v.result, v.by_unit, loss_scale, clipping, stream);
    } else {
      device_.gradient_factor(*v.mine, v.by_unit, loss_scale, clipping, stream);
      collectives_.all_gather_on_device(std::as_writable_bytes(v.by_rank),
                                        std::as_bytes(std::span(&v.mine->sum_of_squares, 1)));
      device_.gradient_factor(*v.result, v.by_rank, loss_scale, clipping, stream);
    }
    device_.copy(host_->bytes().first(sizeof(GradientFactor)),
                 std::as_bytes(std::span(v.result, 1)), stream);
    computed_ = stream.record();
  }
  // For other threads: the factor, once the compute stream has done what it held after begin().
  std::function<float()> factor_on_host() const {
    return [result = host_->bytes().data()] {
      GradientFactor found;
      std::memcpy(&found, result, sizeof(found));
      return found.factor;
    };
  }
  // In memory of the device; of the last begin().
  const float* factor() const { return &values().result->factor; }
  bool begun() const { return computed_ != nullptr; }

  struct Finding {
    double norm = 0.0;
    bool finite = true;
  };
  // The finding that begin() queued; waits for the device.
  Finding finish() {
    STRATA_ASSERT(begun());
    std::exchange(computed_, nullptr)->wait();
    GradientFactor result;
    std::memcpy(&result, host_->bytes().data(), sizeof(result));
    return {kernels::norm_of(result.sum_of_squares, loss_scale_), !std::isnan(result.factor)};
  }
  // By unit: the sum of this rank's squares. After finish().
  std::vector<double> sums_of_squares() {
    std::vector<double> sums(shards_.count());
    device::Stream& stream = device_.compute_stream();
    device_.copy(std::as_writable_bytes(std::span(sums)), std::as_bytes(values().by_unit), stream);
    stream.synchronize();
    return sums;
  }

 private:
  // Parts of `memory_`.
  struct Values {
    std::span<double> by_unit;
    std::span<double> by_rank;
    GradientFactor* mine = nullptr;
    GradientFactor* result = nullptr;
  };
  Values values() const {
    const std::span<std::byte> bytes = memory_->bytes();
    const auto ranks = static_cast<std::size_t>(collectives_.world_size());
    auto* const factors = reinterpret_cast<GradientFactor*>(bytes.data());
    auto* const doubles = reinterpret_cast<double*>(factors + 2);
    return {{doubles + ranks, shards_.count()}, {doubles, ranks}, factors, factors + 1};
  }

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
  void gather(const Take& take) {
    reducer_.complete_groups();
    reducer_.reduce_late();
    GradientShards& shards = reducer_.shards();
    const auto wanted = [](const Unit& unit) { return unit.trainable() && !unit.spec.tile(); };
    Bytes largest;
    for (const Unit& unit : units_) {
      if (wanted(unit))
        largest = std::max(largest, bytes_of(unit.layout.padded(), DType::kFloat32));
    }
    if (largest == Bytes()) return;
    const auto memory = device_.allocate(largest, memory::Kind::kStaging);
    device::Stream& stream = device_.compute_stream();
    const auto mine = static_cast<std::size_t>(collectives_.shard_position().index);
    for (const Unit& unit : units_) {
      if (!wanted(unit)) continue;
      const std::size_t bytes = bytes_of(unit.layout.shard(), DType::kFloat32).size();
      const auto slice = [&](std::size_t rank) {
        return memory->bytes().subspan(rank * bytes, bytes);
      };
      if (shards.filled(unit.id))
        device_.copy(slice(mine), std::as_bytes(shards.values(unit.id)), stream);
      else
        device_.fill_zero(slice(mine), stream);
      stream.synchronize();
      // Where every shard group holds all of them, those of the first count.
      for (int rank = 0; rank < unit.layout.world_size(); ++rank)
        collectives_.broadcast(slice(static_cast<std::size_t>(rank)), rank);
      if (take) take(unit, reinterpret_cast<const float*>(memory->bytes().data()));
    }
    stream.synchronize();
  }
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
