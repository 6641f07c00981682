// This rank's reduced gradients: one shard a trainable unit, accumulated over the micro-steps of a
// step. Kept in the accumulation dtype; reductions arrive in fp32 and are rounded once each when
// that is narrower. Threads: one thread at a time. Memory: allocated at the first reduction of each
// unit, kept since.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"

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
  // Parameters that no rank gave a gradient in this step, in ascending order. The optimizer leaves
  // them as they are.
  void leave_out(std::vector<int> params) { left_out_ = std::move(params); }
  const std::vector<int>& left_out() const { return left_out_; }
  bool left_out(int param) const { return std::ranges::binary_search(left_out_, param); }
  // fp32 values of a filled shard; valid until the next call with another unit where the dtype is
  // narrow.
  std::span<float> values(int unit);
  // Of each of these filled shards.
  std::vector<kernels::GradStats> statistics(std::span<const int> units);
  // Of an fp32 shard: queues the sum of its squares, for squares(), behind the reduction that fills
  // it, in that one's stream.
  void measure(int unit, device::Stream& stream);
  // By unit, in memory of the device, of what is filled; else 0. On the compute stream.
  std::span<const double> squares();
  // The values of a filled fp32 shard were changed by somebody else: its squares are summed again.
  void note_change(int unit) { shards_[static_cast<std::size_t>(unit)].measured = false; }
  DType dtype() const { return dtype_; }
  std::size_t count() const { return shards_.size(); }  // units
  // Forgets all values and what is left out; the memory stays.
  void clear();

 private:
  struct Shard {
    std::unique_ptr<device::Memory> memory;
    std::unique_ptr<device::Memory>
        arriving;  // fp32, only between begin() and settle() of a narrow dtype
    bool filled = false;
    bool measured = false;  // its place in squares_ is of these values
    bool stale = false;     // its place in squares_ is not 0
  };
  struct Arrived {
    std::unique_ptr<device::Memory> memory;
    std::unique_ptr<device::Event> folded_in;
  };
  // The host waits rather than hold more of what a device that runs ahead has yet to fold in.
  static constexpr std::size_t kArrived = 2;

  std::span<double> squares_memory();
  void measure_run(std::size_t first, std::size_t end, device::Stream& stream);
  std::span<float> scratch(std::unique_ptr<device::Memory>& memory, Numel numel);

  std::vector<Unit>& units_;
  device::Device& device_;
  DType dtype_;
  std::vector<Shard> shards_;
  std::vector<int> left_out_;
  std::deque<Arrived> arrived_;              // settled, and not freed; the oldest first
  std::unique_ptr<device::Memory> squares_;  // a double by unit; null: nobody asked yet
  std::unique_ptr<device::Memory>
      widened_;  // fp32 copy that values() hands out where the dtype is narrow
};

}  // namespace strata::engine
