// This rank's reduced gradients: one shard for each trainable unit, accumulated over the
// micro-steps of a step. Shards have the accumulation dtype; reductions arrive in fp32, and each is
// rounded once if that dtype is narrower. Shards lie on the device, or in pinned host memory with
// the same bits: then reductions arrive in device memory and leave it unit by unit, beside other
// work of the device, and the optimizer reaches the values over the link. Threads: one thread at a
// time. Memory: taken at the first reduction, and kept. Errors: OutOfMemoryError.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/offload/host_memory.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// A value for each element of trainable units' shards. For a unit that rests on the host this is
// pinned host memory, taken for all such units at once, since the driver takes long to pin memory,
// whatever its size. Otherwise it is device memory, taken unit by unit. Its first content is
// undefined. It borrows the units and the device.
class ShardMemory {
 public:
  // `wanted`: whether of() will be called for a trainable unit.
  using Which = std::function<bool(const Unit& unit)>;
  ShardMemory(const std::vector<Unit>& units, device::Device& device, memory::Kind kind,
              DType dtype, Which on_host, Which wanted = {})
      : units_(units),
        device_(device),
        kind_(kind),
        dtype_(dtype),
        on_host_(std::move(on_host)),
        wanted_(std::move(wanted)) {}

  // Takes the memory if need be.
  std::span<std::byte> of(const Unit& unit) {
    places_.resize(units_.size());
    Place& place = nth(places_, unit.id);
    if (place.values == nullptr) {
      STRATA_ASSERT(lacks(unit));
      if (on_host_(unit)) {
        take_on_host();
      } else {
        place.own = device_.allocate(bytes(unit), kind_);
        place.values = place.own->bytes().data();
      }
    }
    return {place.values, bytes(unit).size()};
  }
  std::span<float> floats_of(const Unit& unit) {
    return {reinterpret_cast<float*>(of(unit).data()), unit.layout.shard().size()};
  }
  // Empty where the unit has none on the device.
  std::span<std::byte> on_device(const Unit& unit) const {
    const bool has = static_cast<std::size_t>(unit.id) < places_.size();
    if (!has || nth(places_, unit.id).own == nullptr) return {};
    return nth(places_, unit.id).own->bytes();
  }
  // Frees the device memory, which no work uses any more.
  void free_on_device() {
    for (Place& place : places_) {
      if (place.own != nullptr) place = {};
    }
  }

 private:
  Bytes bytes(const Unit& unit) const { return bytes_of(unit.layout.shard(), dtype_); }
  bool lacks(const Unit& unit) const {
    return unit.trainable() && nth(places_, unit.id).values == nullptr &&
           (wanted_ == nullptr || wanted_(unit));
  }
  void take_on_host() {
    std::vector<const Unit*> missing;
    Bytes all;
    for (const Unit& unit : units_) {
      if (!lacks(unit) || !on_host_(unit)) continue;
      missing.push_back(&unit);
      all += align_up(bytes(unit), kHostAlignment);
    }
    host_.push_back(offload::pinned_memory(device_, all, kind_));
    std::byte* next = host_.back()->bytes().data();
    for (const Unit* unit : missing) {
      nth(places_, unit->id).values = next;
      next += align_up(bytes(*unit), kHostAlignment).size();
    }
  }

  static constexpr Bytes kHostAlignment = 256_B;  // as memory of a device has

  const std::vector<Unit>& units_;
  device::Device& device_;
  memory::Kind kind_;
  DType dtype_;
  Which on_host_;
  Which wanted_;  // null: all
  // All units' there, and once more those of units that were unfrozen since.
  std::vector<std::unique_ptr<device::Memory>> host_;
  struct Place {
    std::byte* values = nullptr;               // null: none yet
    std::unique_ptr<device::Memory> own = {};  // null: on the host
  };
  std::vector<Place> places_;  // by unit
};

class GradientShards {
 public:
  // `tier`: for units that name none. Notifies `watch` of bytes that leave the device or come.
  GradientShards(std::vector<Unit>& units, device::Device& device, DType dtype, memory::Tier tier,
                 offload::LinkWatch& watch);

  // Where the next reduction of `unit` shall go, and whether it adds to what is there. With a
  // narrow dtype, and on the host, that is scratch memory which finish() folds in.
  struct Target {
    std::span<float> result;
    bool accumulate = false;
  };
  Target begin(int unit);
  void finish(int unit);

  bool filled(int unit) const { return nth(shards_, unit).filled; }
  // The parameters without a gradient on any rank in this step, ascending. They do not change.
  void leave_out(std::vector<int> params) { left_out_ = std::move(params); }
  const std::vector<int>& left_out() const { return left_out_; }
  bool left_out(int param) const { return std::ranges::binary_search(left_out_, param); }
  // The fp32 values of a filled shard; if dtype() is narrow, until a call for another unit.
  std::span<float> values(int unit);
  std::vector<kernels::GradStats> statistics(std::span<const int> units);  // of filled shards
  // Queues the sum of an fp32 shard's squares, for squares(), in the stream of reductions, behind
  // the one that fills the shard. squares() sums shards to which reductions are added, and tiles.
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
    std::unique_ptr<device::Memory> arriving;  // fp32 scratch, between begin() and finish()
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
  std::unique_ptr<device::Memory> take_scratch(Bytes bytes);
  void fold_in(int unit, device::Stream& stream);
  // Calls `read`, which queues a kernel that reads these shards; notifies the watch if it must.
  void read_values(std::size_t first, std::size_t end, device::Stream& stream,
                   const offload::LinkWatch::Call& read);
  void wait_for_arrived();
  std::span<double> squares_memory();
  void measure_run(std::size_t first, std::size_t end, device::Stream& stream);
  std::span<std::byte> kept(int unit) { return memory_.of(nth(units_, unit)); }

  std::vector<Unit>& units_;
  device::Device& device_;
  DType dtype_;
  memory::Tier tier_;
  offload::LinkWatch& watch_;
  ShardMemory memory_;
  std::unique_ptr<device::Stream> leaving_;  // to the host; null: the compute stream
  std::vector<Shard> shards_;
  std::vector<int> left_out_;
  std::deque<Arrived> arrived_;  // finished, and perhaps not folded in; the oldest first
  std::vector<std::unique_ptr<device::Memory>> spare_;  // unused scratch
  std::unique_ptr<device::Memory> squares_;             // a double by unit; null: not asked for yet
  device::Stream* measuring_ = nullptr;      // it may still read shards; null: compute waits for it
  std::unique_ptr<device::Memory> widened_;  // values() returns it where the dtype is narrow
};

}  // namespace strata::engine
