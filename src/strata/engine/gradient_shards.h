// This rank's reduced gradients: one shard a trainable unit, accumulated over the micro-steps of a
// step. Kept in the accumulation dtype; reductions arrive in fp32 and are rounded once each when
// that is narrower. Threads: one thread at a time. Memory: allocated at the first reduction of each
// unit, kept since.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/unit.h"

namespace strata::engine {

class GradientShards {
 public:
  GradientShards(std::vector<Unit>& units, device::Device& device, DType dtype);

  // Where the next reduction of `unit` shall go, and whether it adds to what is there. With a
  // narrow dtype that is scratch memory which settle() folds in.
  struct Target {
    std::span<float> result;
    bool accumulate = false;
  };
  Target begin(int unit);
  void settle(int unit);

  bool filled(int unit) const { return shards_[static_cast<std::size_t>(unit)].filled; }
  // fp32 values of a filled shard; valid until the next call with another unit where the dtype is
  // narrow.
  std::span<float> values(int unit);
  // Of each of these filled shards.
  std::vector<kernels::GradStats> statistics(std::span<const int> units);
  // Of fp32 shards: sums[i], in memory of the device, is that of units[i].
  void sums_of_squares(std::span<double> sums, std::span<const int> units);
  DType dtype() const { return dtype_; }
  std::size_t count() const { return shards_.size(); }  // units
  // Forgets all values; the memory stays.
  void clear();

 private:
  struct Shard {
    std::unique_ptr<device::Memory> memory;
    std::unique_ptr<device::Memory>
        arriving;  // fp32, only between begin() and settle() of a narrow dtype
    bool filled = false;
  };

  std::span<float> scratch(std::unique_ptr<device::Memory>& memory, Numel numel);

  std::vector<Unit>& units_;
  device::Device& device_;
  DType dtype_;
  std::vector<Shard> shards_;
  std::unique_ptr<device::Memory>
      widened_;  // fp32 copy that values() hands out where the dtype is narrow
};

}  // namespace strata::engine
