// A value for each element of trainable units' shards. For a unit that rests on the host this is
// pinned host memory, taken for all such units at once, since the driver takes long to pin memory,
// whatever its size. Otherwise it is device memory, taken unit by unit. Its first content is
// undefined. Values of the host may be cached: then they are in memory of the device. Threads: one
// thread at a time. Ownership: borrows the units and the device. Errors: OutOfMemoryError.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/device/device.h"
#include "strata/engine/unit/unit.h"
#include "strata/offload/host_memory.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

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
    if (place.cached != nullptr) return place.cached->bytes();
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
  bool cached(const Unit& unit) const {
    const bool has = static_cast<std::size_t>(unit.id) < places_.size();
    return has && nth(places_, unit.id).cached != nullptr;
  }
  // From the next change_places() on a unit of the host is cached, if the device has memory for it
  // now, or no more.
  void cache(const Unit& unit, bool on_device) {
    of(unit);
    auto& next = nth(places_, unit.id).next_cached.emplace();
    if (!on_device) return;
    try {
      next = device_.allocate(bytes(unit), kind_);
    } catch (const OutOfMemoryError&) {  // it stays on the host
    }
  }
  // Forgets the values of units that change: after the last work on them.
  void change_places() {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      Place& place = places_[i];
      if (!place.next_cached) continue;
      if (place.cached != nullptr) settle(units_[i]);
      place.cached = std::move(*std::exchange(place.next_cached, std::nullopt));
    }
  }
  // Nothing is cached any more. Keeps the values of units for which `filled` says so.
  void bring_back(const Which& filled) {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      Place& place = places_[i];
      place.next_cached.reset();
      if (place.cached == nullptr) continue;
      const std::span<std::byte> home(place.values, place.cached->bytes().size());
      if (filled(units_[i])) device_.copy(home, place.cached->bytes(), device_.compute_stream());
      settle(units_[i]);
      place.cached.reset();
    }
  }
  // Frees all memory, which no work uses any more, or that on the device.
  void free() {
    places_.clear();
    host_.clear();
  }
  void free_on_device() {
    for (Place& place : places_) {
      if (place.own != nullptr) place = {};
    }
  }

 private:
  Bytes bytes(const Unit& unit) const { return bytes_of(unit.layout.shard(), dtype_); }
  // No work uses its values any more.
  void settle(const Unit& unit) {
    unit.await_update(device_.compute_stream());
    device_.compute_stream().synchronize();
  }
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
    std::byte* values = nullptr;                  // null: none yet
    std::unique_ptr<device::Memory> own = {};     // null: on the host
    std::unique_ptr<device::Memory> cached = {};  // null: in `values`
    std::optional<std::unique_ptr<device::Memory>> next_cached = {};
  };
  std::vector<Place> places_;  // by unit
};

// Device memory for values that arrive and are then moved on by a stream; units repeat, so it is
// used again. Threads: one thread at a time. Ownership: borrows the device. Errors:
// OutOfMemoryError, DeviceError.
class ScratchMemory {
 public:
  explicit ScratchMemory(device::Device& device) : device_(device) {}

  // At least so large, and not twice as large.
  std::unique_ptr<device::Memory> take(Bytes bytes) {
    for (auto& each : spare_) {
      const Bytes has(each->bytes().size());
      if (has < bytes || has > bytes * 2) continue;
      std::swap(each, spare_.back());
      auto found = std::move(spare_.back());
      spare_.pop_back();
      return found;
    }
    if (spare_.size() > kUsed) spare_.erase(spare_.begin());
    return device_.allocate(bytes, memory::Kind::kGradientShards);
  }
  // No work uses it any more, or none after the event. The host waits for the oldest one: by number
  // alone, since the memory that is held must not depend on the speed of a stream.
  void give_back(std::unique_ptr<device::Memory> memory) { spare_.push_back(std::move(memory)); }
  void give_back(std::unique_ptr<device::Memory> memory, std::unique_ptr<device::Event> used) {
    used_.push_back({std::move(memory), std::move(used)});
    while (used_.size() > kUsed) {
      used_.front().event->wait();
      give_back(std::move(used_.front().memory));
      used_.pop_front();
    }
  }
  bool in_use() const { return !used_.empty(); }
  void free() {
    used_.clear();
    spare_.clear();
  }

 private:
  static constexpr std::size_t kUsed = 2;
  struct Used {
    std::unique_ptr<device::Memory> memory;
    std::unique_ptr<device::Event> event;
  };
  device::Device& device_;
  std::deque<Used> used_;  // perhaps by work under way; the oldest first
  std::vector<std::unique_ptr<device::Memory>> spare_;
};

// Adds fp32 sums that rest on the host to values of the device. Threads: one thread at a time.
// Ownership: borrows the device, and the watch that it notifies. Errors: OutOfMemoryError.
class HostSums {
 public:
  HostSums(device::Device& device, offload::LinkWatch& watch) : device_(device), watch_(watch) {}

  // Queued in `stream`: values += sum, which comes after the compute stream and the event, if it is
  // not null. Sums of other units leave the device meanwhile.
  void add_to(std::span<float> values, std::span<const std::byte> sum, device::Event* after,
              device::Stream& stream) {
    if (coming_ == nullptr) coming_ = device_.create_stream();
    coming_->wait_for(*device_.compute_stream().record());  // a script may have changed it
    if (after != nullptr) coming_->wait_for(*after);
    auto memory = sums_.take(Bytes(sum.size()));
    const std::span<std::byte> here = memory->bytes().first(sum.size());
    watch_.copy(offload::Link::kUp, Bytes(sum.size()), *coming_,
                [&] { device_.copy(here, sum, *coming_); });
    stream.wait_for(*coming_->record());
    device_.accumulate(reinterpret_cast<std::byte*>(values.data()), DType::kFloat32, here.data(),
                       DType::kFloat32, Numel(values.size()), stream);
    sums_.give_back(std::move(memory), stream.record());
  }
  void free() { sums_.free(); }

 private:
  device::Device& device_;
  offload::LinkWatch& watch_;
  std::unique_ptr<device::Stream> coming_;  // from the host; null: nothing came yet
  ScratchMemory sums_{device_};
};

// Narrows fp32 values in device memory to 16 bits, in place. Threads: one thread at a time, and one
// stream. Ownership: borrows the device. Errors: OutOfMemoryError.
class Narrowing {
 public:
  explicit Narrowing(device::Device& device) : device_(device) {}

  // Queues it; returns the narrow values. Each piece goes where the fp32 values of the ones before
  // it were. So pieces double, and the first one goes by other memory.
  std::span<const std::byte> narrow(std::span<std::byte> values, DType dtype, Numel numel,
                                    device::Stream& stream) {
    constexpr Numel kFirst{1 << 20};
    if (first_ == nullptr)
      first_ = device_.allocate(bytes_of(kFirst, dtype), memory::Kind::kGradientShards);
    const auto cast = [&](std::byte* target, Numel begin, Numel end) {
      const std::byte* const from = values.data() + bytes_of(begin, DType::kFloat32).size();
      device_.cast(target, dtype, from, DType::kFloat32, end - begin, stream);
    };
    Numel end = std::min(kFirst, numel);
    const std::size_t first = bytes_of(end, dtype).size();
    cast(first_->bytes().data(), Numel(), end);
    device_.copy(values.first(first), first_->bytes().first(first), stream);
    for (Numel begin = end; begin < numel; begin = end) {
      end = std::min(begin + begin, numel);
      cast(values.data() + bytes_of(begin, dtype).size(), begin, end);
    }
    return values.first(bytes_of(numel, dtype).size());
  }

 private:
  device::Device& device_;
  std::unique_ptr<device::Memory> first_;  // a piece; null: none yet
};

}  // namespace strata::engine
