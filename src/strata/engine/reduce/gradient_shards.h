// This rank's reduced gradients: one shard for each trainable unit, accumulated over the
// micro-steps of a step. Shards have the accumulation dtype; reductions arrive in fp32, and each is
// rounded once if that dtype is narrower. Shards lie on the device, or in pinned host memory with
// the same values: then reductions arrive in device memory and leave it unit by unit, beside other
// work of the device. Later micro-steps bring a unit's sum to the device and send it back, both by
// copies. Its squares are summed before it leaves. Sums of one rank's gradients of
// 16 bits are numbers of 16 bits, which is what the host keeps of them until something is added to
// one. Threads: one thread at a time. Memory: taken at the first reduction, and kept. Errors:
// OutOfMemoryError.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/reduce/shard_memory.h"
#include "strata/engine/unit/unit.h"
#include "strata/offload/host_memory.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

class GradientShards {
 public:
  // `tier`: for units that name none. `in_16`: gradients on the host may rest in 16 bits. Notifies
  // `watch` of bytes that leave the device or come.
  GradientShards(std::vector<Unit>& units, device::Device& device, DType dtype, memory::Tier tier,
                 bool in_16, offload::LinkWatch& watch);

  // Where the next reduction of `unit` shall go, and whether it adds to what is there. With a
  // narrow dtype, and on the host, that is scratch memory which finish() folds in. `is_16`: its
  // results will be numbers of the weights' 16-bit dtype.
  struct Target {
    std::span<float> result;
    bool accumulate = false;
  };
  Target begin(int unit, bool is_16);
  void finish(int unit);

  bool filled(int unit) const { return nth(shards_, unit).filled; }
  // The parameters without a gradient on any rank in this step, ascending. They do not change.
  void leave_out(std::vector<int> params) { left_out_ = std::move(params); }
  const std::vector<int>& left_out() const { return left_out_; }
  bool left_out(int param) const { return std::ranges::binary_search(left_out_, param); }
  // The fp32 values of a filled shard; if it rests in fewer bits, until a call for another unit.
  std::span<float> values(int unit);
  // Work that the compute stream gets from here on finds all finished values.
  void wait_for_arrived();
  // A filled shard as it rests, complete when squares() is.
  struct Resting {
    std::span<const std::byte> values;
    DType dtype = DType::kFloat32;
  };
  Resting resting(int unit);
  // After this event a filled shard of the host is complete; null: it is in the compute stream.
  device::Event* arrived(int unit) const {
    return moves(unit) ? nth(shards_, unit).left.get() : nullptr;
  }
  DType resting_dtype(int unit) const { return kept_dtype(nth(units_, unit)); }
  // Queues the sum of an fp32 shard's squares, for squares(), in the stream of reductions, behind
  // the one that fills the shard. squares() sums shards to which reductions are added, and tiles.
  void measure(int unit, device::Stream& stream);
  // By unit: the sum of squares; 0 if not filled. In device memory, on the compute stream; or here,
  // after a wait for it.
  std::span<const double> squares();
  std::vector<double> sums_of_squares();
  // The kept values, from now on in dtype(), for changes in the compute stream; zeroes until
  // filled.
  std::span<std::byte> change(int unit);
  DType dtype() const { return dtype_; }
  // Where the unit's rest; values() of narrow ones are on the device all the same.
  bool on_host(int unit) const {
    const Unit& of = nth(units_, unit);
    return is_far(of) && !(rests_in_16(of) ? memory_16_ : memory_).cached(of);
  }
  // From the next clear() on a unit of the host rests on the device, if that has memory now, or on
  // the host again.
  void cache(int unit, bool on_device) {
    memory_of(nth(units_, unit)).cache(nth(units_, unit), on_device);
  }
  std::size_t count() const { return shards_.size(); }  // units
  void keep_in_32();  // from now on shards rest in dtype(); waits for the device
  void clear();       // forgets all values and what is left out; the memory stays
  // Between passes: moves values on the device to the host, and frees all their device memory.
  // Until reload_states() only filled(), on_host() and clear() may be called. Both calls may throw
  // OutOfMemoryError, and be called again: offload_states() has done nothing then, reload_states()
  // a part.
  void offload_states(bool pinned);
  void reload_states();

 private:
  struct Shard {
    std::unique_ptr<device::Memory> arriving;  // fp32 scratch, between begin() and finish()
    std::unique_ptr<offload::OffloadedCopy> offloaded;
    std::unique_ptr<device::Event> left;  // when the host has what was sent; null: nothing was
    bool filled = false;
    bool measured = false;  // its place in squares_ is of these values
    bool stale = false;     // its place in squares_ is not 0
  };
  bool is_far(const Unit& unit) const { return unit.gradient_tier(tier_) == memory::Tier::kHost; }
  bool through_scratch(int unit) const { return moves(unit) || dtype_ != DType::kFloat32; }
  // Its sums move in a stream beside the compute stream.
  bool moves(int unit) const { return on_host(unit) || rests_in_16(nth(units_, unit)); }
  bool rests_in_16(const Unit& unit) const {
    return in_16_ && is_far(unit) && size_of(unit.layout.dtype()) == 2_B;
  }
  void fold_in(int unit, device::Stream& stream);
  // Calls `read`, which queues a kernel that reads these shards; notifies the watch if it must.
  void read_values(std::size_t first, std::size_t end, device::Stream& stream,
                   const offload::LinkWatch::Call& read);
  std::span<double> squares_memory();
  void measure_run(std::size_t first, std::size_t end, device::Stream& stream);
  std::span<std::byte> kept(int unit) { return memory_of(nth(units_, unit)).of(nth(units_, unit)); }
  ShardMemory& memory_of(const Unit& unit) { return rests_in_16(unit) ? memory_16_ : memory_; }
  DType kept_dtype(const Unit& unit) const {
    return rests_in_16(unit) ? unit.layout.dtype() : dtype_;
  }

  std::vector<Unit>& units_;
  device::Device& device_;
  DType dtype_;
  memory::Tier tier_;
  offload::LinkWatch& watch_;
  bool in_16_;
  ShardMemory memory_;
  ShardMemory memory_16_;                    // of shards that rest in 16 bits
  std::unique_ptr<device::Stream> leaving_;  // to the host; null: the compute stream
  std::vector<Shard> shards_;
  std::vector<int> left_out_;
  ScratchMemory scratch_{device_};  // of reductions
  HostSums host_sums_{device_, watch_};
  Narrowing narrowing_{device_};
  std::unique_ptr<device::Memory> squares_;  // a double by unit; null: not asked for yet
  device::Stream* measuring_ = nullptr;      // it may still read shards; null: compute waits for it
  std::unique_ptr<device::Memory> widened_;  // values() returns it where the dtype is narrow
};

}  // namespace strata::engine
