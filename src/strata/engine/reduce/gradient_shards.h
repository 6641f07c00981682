// This rank's reduced gradients: one shard for each trainable unit, accumulated over the
// micro-steps of a step. Shards have the accumulation dtype; reductions arrive in fp32, and each is
// rounded once if that dtype is narrower. Shards lie on the device or in pinned host memory. In the
// second case reductions arrive in device memory and leave it unit by unit, beside other work of
// the device; the optimizer then reaches the values over the link. The bits are the same. Threads:
// one thread at a time. Memory: on the device allocated at the first reduction of each unit, on the
// host at the first reduction of all; kept since. Errors: OutOfMemoryError.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/offload/host_memory.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class GradientShards {
 public:
  // `tier`: for units that name none. Notifies `watch` of bytes that leave the device or come.
  GradientShards(std::vector<Unit>& units, device::Device& device, DType dtype, memory::Tier tier,
                 offload::LinkWatch& watch);

  // Where the next reduction of `unit` shall go, and whether it adds to what is there. With a
  // narrow dtype, and on the host, that is scratch memory which settle() folds in.
  struct Target {
    std::span<float> result;
    bool accumulate = false;
  };
  Target begin(int unit);
  void settle(int unit);

  bool filled(int unit) const { return nth(shards_, unit).filled; }
  // The parameters without a gradient on any rank in this step, ascending. They do not change.
  void leave_out(std::vector<int> params) { left_out_ = std::move(params); }
  const std::vector<int>& left_out() const { return left_out_; }
  bool left_out(int param) const { return std::ranges::binary_search(left_out_, param); }
  // The fp32 values of a filled shard; if dtype() is narrow, until a call for another unit.
  std::span<float> values(int unit);
  std::vector<kernels::GradStats> statistics(std::span<const int> units);  // of filled shards
  // Queues the sum of an fp32 shard's squares, for squares(), in the stream of the reduction that
  // fills it, behind that. Where what has arrived is not all of it, squares() sums later, and so
  // with a tile that stays on the device: all of those at once.
  void measure(int unit, device::Stream& stream);
  // By unit: the sum of squares, in device memory; 0 if not filled. On the compute stream.
  std::span<const double> squares();
  // The kept values, in dtype(), for changes in the compute stream; zeroes until filled.
  std::span<std::byte> change(int unit);
  DType dtype() const { return dtype_; }
  // Where the unit's rest; values() of narrow ones are on the device all the same.
  bool on_host(int unit) const {
    return nth(units_, unit).gradient_tier(tier_) == memory::Tier::kHost;
  }
  std::size_t count() const { return shards_.size(); }  // units
  void clear();  // forgets all values and what is left out; the memory stays
  // Between passes: moves values on the device to the host, and frees all their device memory.
  // Until reload_states() only filled(), on_host() and clear() may be called. Both calls may throw
  // OutOfMemoryError, and be called again: offload_states() has done nothing then, reload_states()
  // a part.
  void offload_states(bool pinned);
  void reload_states();

 private:
  struct Shard {
    std::unique_ptr<device::Memory> memory;    // null on the host
    std::byte* values = nullptr;               // null: no memory yet
    std::unique_ptr<device::Memory> arriving;  // fp32 scratch, between begin() and settle()
    std::unique_ptr<offload::OffloadedCopy> offloaded;
    bool filled = false;
    bool measured = false;  // its place in squares_ is of these values
    bool stale = false;     // its place in squares_ is not 0
  };
  struct Arrived {
    std::unique_ptr<device::Memory> memory;
    std::unique_ptr<device::Event> folded_in;
  };
  static constexpr std::size_t kArrived = 2;  // held at most: the host waits for what is folded in

  bool through_scratch(int unit) const { return on_host(unit) || dtype_ != DType::kFloat32; }
  void take_memory(int unit);
  std::unique_ptr<device::Memory> take_scratch(Bytes bytes);
  void fold_in(int unit, device::Stream& stream);
  // Calls `read`, which queues a kernel that reads these shards; notifies the watch if it must.
  void read_values(std::size_t first, std::size_t end, device::Stream& stream,
                   const offload::LinkWatch::Call& read);
  void wait_for_arrived();
  std::span<double> squares_memory();
  void measure_run(std::size_t first, std::size_t end, device::Stream& stream);
  std::span<float> scratch(std::unique_ptr<device::Memory>& memory, Numel numel);

  std::vector<Unit>& units_;
  device::Device& device_;
  DType dtype_;
  memory::Tier tier_;
  offload::LinkWatch& watch_;
  // All shards, where they lie there, and once more those of units that were unfrozen since.
  std::vector<std::unique_ptr<device::Memory>> host_;
  std::unique_ptr<device::Stream> leaving_;  // to the host; null: the compute stream
  std::vector<Shard> shards_;
  std::vector<int> left_out_;
  std::deque<Arrived> arrived_;  // settled, and perhaps not folded in; the oldest first
  std::vector<std::unique_ptr<device::Memory>> spare_;  // unused scratch
  std::unique_ptr<device::Memory> squares_;             // a double by unit; null: not asked for yet
  std::unique_ptr<device::Memory> widened_;  // values() returns it where the dtype is narrow
};

}  // namespace strata::engine
