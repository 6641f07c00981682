// The sharded units while they have memory: released (no memory) -> gathering (an operation runs)
// -> gathered (parameters attached, pinned or evictable) -> released. The gathered bytes have a
// bound, which only units in use may exceed. The unit that is used last is evicted first
// (plan::FetchOrder).
//
// Threads: one thread at a time. Ownership: owns the memory; borrows the rest. Errors: CommError
// from the collectives. OutOfMemoryError from gather() after all unpinned units were evicted; it
// lists the pinned ones. The unit is released then.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"
#include "strata/engine/unit/weight_shards.h"
#include "strata/memory/buffer_pool.h"
#include "strata/memory/host_buffer.h"
#include "strata/offload/state_store.h"
#include "strata/plan/fetch_order.h"

namespace strata::engine {

// Goes when nothing that was queued uses it: no kernel of the model, and no gather, since the
// compute stream waits for each gather before the memory is given back.
class GatheredMemory final : public device::Memory {
 public:
  GatheredMemory(device::Device& device, Bytes bytes)
      : device_(device), memory_(device.allocate(bytes, memory::Kind::kGathered)) {}
  ~GatheredMemory() override {
    // If the device has failed, each wait for its work throws that error.
    FirstError().attempt([this] { device_.compute_stream().synchronize(); });
  }
  std::span<std::byte> bytes() override { return memory_->bytes(); }

 private:
  device::Device& device_;
  std::unique_ptr<device::Memory> memory_;
};

// For a single rank: the upload of its own shard, or its update, is the whole gather.
class EventWork final : public comm::Work {
 public:
  using Events = std::vector<std::shared_ptr<device::Event>>;
  EventWork(Events events, device::Device& device) : events_(std::move(events)), device_(device) {}
  ~EventWork() override {
    FirstError().attempt([this] { EventWork::wait(); });  // a failed device throws in each wait
  }
  bool done() override {
    return std::ranges::all_of(events_, [](const auto& event) { return event->done(); });
  }
  void wait() override {
    for (const auto& event : std::exchange(events_, {})) device_.compute_stream().wait_for(*event);
  }

 private:
  Events events_;  // empty: the compute stream waits for them already
  device::Device& device_;
};

// Memory for units while they are gathered (memory::BufferPool).
//
// Where gathers are one-sided, a rank whose device is out of memory may gather less than others.
// Where they are collectives, all ranks have to gather the same. So whenever ranks make a buffer,
// they agree whether all of them got one: if one rank has no memory, take() fails on all. Ranks
// make buffers at the same points, since they give back and free the same ones. Several shard
// groups may gather different units and cannot agree; there a shortage is an error
// (may_do_without()). It must outlive its leases. Errors: CommError from take() where it agrees.
class GatherMemory {
 public:
  using Pool = memory::BufferPool<device::Memory>;

  GatherMemory(device::Device& device, comm::Collectives& collectives)
      : collectives_(collectives),
        ranks_(ranks_of(collectives)),
        pool_([&device](Bytes bytes) { return std::make_unique<GatheredMemory>(device, bytes); }) {}

  // Its rounds are passes. Ranks that agree trim it together.
  Pool& pool() { return pool_; }

  // `shortage` empty: `lease` has the memory. Otherwise this rank, or the rank that `shortage`
  // names if ranks agree, has no memory for it; unused buffers have been freed.
  struct Taken {
    Pool::Lease lease;
    std::string shortage;
  };
  // `preferred`: as in BufferPool::acquire().
  Taken take(Bytes footprint, const device::Memory* preferred) {
    if (ranks_ == Ranks::kAgree) return take_together(footprint, preferred);
    try {
      return {pool_.acquire(footprint, preferred), ""};
    } catch (const OutOfMemoryError& error) {
      return {{}, error.what()};
    }
  }
  // Takes the buffer out of a lease, which gets another one. Null: there is no memory for that.
  std::shared_ptr<device::Memory> replace(Pool::Lease& lease) {
    try {
      return pool_.replace(lease);
    } catch (const OutOfMemoryError&) {
      return nullptr;
    }
  }
  // Whether a rank may go on with less than take() was asked for.
  bool may_do_without() const { return ranks_ != Ranks::kCannotAgree; }

 private:
  // How the ranks that gather together ensure that they gather the same.
  enum class Ranks { kNeedNot, kAgree, kCannotAgree };
  static Ranks ranks_of(const comm::Collectives& collectives) {
    const comm::ShardPosition place = collectives.shard_position();
    if (collectives.traits().one_sided || place.held_count() == 1) return Ranks::kNeedNot;
    return place.groups == 1 ? Ranks::kAgree : Ranks::kCannotAgree;
  }

  // Collective.
  Taken take_together(Bytes footprint, const device::Memory* preferred) {
    if (pool_.has_cached(footprint)) return {pool_.acquire(footprint, preferred), ""};
    std::string shortage;
    // Free buffers are freed by all ranks or none: that one rank alone has them would have it make
    // fewer new ones, and miss an agreement.
    for (const bool second : {false, true}) {
      if (second) pool_.trim();
      Pool::Lease lease;
      std::string mine;
      try {
        lease = pool_.acquire_new(footprint);
      } catch (const OutOfMemoryError& error) {
        mine = error.what();
      }
      const std::vector<std::string> all = collectives_.all_gather_text(mine);
      const std::optional<std::size_t> first = comm::first_text(all);
      if (!first) return {std::move(lease), ""};
      shortage = static_cast<int>(*first) == collectives_.rank()
                     ? mine
                     : fmt::format("rank {}: {}", *first, all[*first]);
    }
    pool_.trim();
    return {{}, shortage};
  }

  comm::Collectives& collectives_;
  Ranks ranks_;
  Pool pool_;
};

// Gathers every rank's shard of a unit into a flat buffer. The collectives alone gather shards in
// device memory. An offloaded shard is first copied to its offset in the flat buffer, on a stream
// of its own, beside the model's work; the gather among ranks follows in place.
//
// Threads: one thread at a time; if anything is offloaded, all ranks gather the same units in the
// same order. Ownership: borrows all; a Work may outlive the call, but not this object. Errors:
// CommError; IoError of a drive, which the other ranks get as a CommError that names this rank.
class ShardGather {
 public:
  // Notifies `watch` of its copies.
  ShardGather(const WeightShards& shards, comm::Collectives& collectives, device::Device& device,
              offload::LinkWatch& watch)
      : shards_(shards), collectives_(collectives), device_(device), watch_(watch) {}

  // Returns when no copy is under way. After an error of the device nothing runs there.
  void finish_copies() noexcept {
    FirstError lost;
    if (uploads_ != nullptr) lost.attempt([this] { uploads_->synchronize(); });
  }

  // `flat` has the unit's whole size; the compute stream no longer uses its old content.
  std::unique_ptr<comm::Work> start(const Unit& unit, std::span<std::byte> flat) {
    if (!unit.offloaded) return collectives_.all_gather(unit.slices, flat, unit.name());
    if (uploads_ == nullptr) uploads_ = device_.create_stream();
    uploads_->wait_for(*device_.compute_stream().record());
    const comm::ShardPosition place = collectives_.shard_position();
    const std::span<std::byte> own = flat.subspan((unit.layout.shard_bytes() * place.index).size(),
                                                  unit.layout.shard_bytes().size());
    try {
      upload(unit, own);
    } catch (const Error& error) {
      // The others are in this gather, or will be.
      collectives_.abort(
          fmt::format("its shard of '{}' cannot be read: {}", unit.name(), error.what()));
      throw;
    }
    if (place.count == 1)
      return std::make_unique<EventWork>(EventWork::Events{uploads_->record()}, device_);
    comm::SliceMap slices = unit.slices;
    slices.writer = uploads_.get();
    return collectives_.all_gather(slices, flat, unit.name());
  }

 private:
  // Copies the shard to its offset in the flat buffer.
  void upload(const Unit& unit, std::span<std::byte> own) {
    shards_.for_each(unit.id, Numel(), unit.layout.shard(), offload::Access::kRead, *uploads_,
                     [&](const WeightShards::Piece& piece) {
                       const std::span<std::byte> target = own.subspan(
                           bytes_of(piece.begin, unit.layout.dtype()).size(), piece.bytes.size());
                       const auto copy = [&] { device_.copy(target, piece.bytes, *uploads_); };
                       if (shards_.cached(unit))
                         copy();
                       else
                         watch_.copy(offload::Link::kUp, Bytes(target.size()), *uploads_, copy);
                       if (piece.lease != nullptr) piece.lease->used_in(*uploads_);
                     });
  }

  const WeightShards& shards_;
  comm::Collectives& collectives_;
  device::Device& device_;
  offload::LinkWatch& watch_;
  std::unique_ptr<device::Stream> uploads_;  // null: none yet
};

class GatheredUnits : NonCopyable {
 public:
  // `order`: the order of uses; it and `units` belong to the Gatherer. `shards`: the weights of
  // these units. `least_ahead`: see fits_ahead().
  GatheredUnits(const std::vector<Unit>& units, const WeightShards& shards,
                comm::Collectives& collectives, device::Device& device, ParameterViews& views,
                StepRecorder& recorder, const plan::FetchOrder& order, const EngineOptions& options,
                Bytes least_ahead)
      : units_(units),
        gathers_(shards, collectives, device, recorder),
        views_(views),
        recorder_(recorder),
        order_(order),
        options_(options),
        least_ahead_(least_ahead),
        memory_(device, collectives),
        slots_(units.size()) {
    if (options.max_live_is_hard) pool().set_total_limit(options.max_live);
    for (const Unit& u : units) {
      if (u.spec.tile() && !u.whole) largest_tile_ = std::max(largest_tile_, u.layout.flat_bytes());
    }
  }
  ~GatheredUnits() {
    gathers_.finish_copies();
    for (const Unit& u : units_) {
      Slot& s = of(u.id);
      s.work.reset();  // waits
      if (s.state != State::kGathered) continue;
      views_.let_go(u.id, [&] { return std::shared_ptr<device::Memory>(s.memory.release()); });
    }
  }

  bool released(int unit) const { return of(unit).state == State::kReleased; }
  bool gathered(int unit) const { return of(unit).state == State::kGathered; }
  std::span<std::byte> flat(int index) const {  // of a gathered unit
    STRATA_ASSERT(gathered(index));
    return of(index).memory->bytes().first(unit(index).layout.flat_bytes().size());
  }

  // A pin keeps a unit's memory. Whole units may be pinned, to no effect.
  void pin(int unit) { ++of(unit).pins; }
  void unpin(int index) {
    STRATA_ASSERT(of(index).pins > 0);
    --of(index).pins;
  }
  bool pinned(int unit) const { return of(unit).pins > 0; }

  // The unit is gathered when this returns. It evicts any unpinned unit that it must.
  void gather(int index) {
    Slot& s = of(index);
    StepCounts& counts = recorder_.counts();
    ++(s.state == State::kReleased    ? counts.late_fetches
       : s.state == State::kGathering ? counts.prefetch_hits
                                      : counts.kept);
    if (s.state == State::kReleased) {
      make_room(footprint(index), -1);  // it may exceed the bound, but only after all else is gone
      s.memory = take(index);
      start(index);
    }
    if (s.state == State::kGathering) finish(index);
  }
  // Starts to gather a released unit; false: there is no memory for it. Nothing is evicted.
  bool start_ahead(int index) {
    GatherMemory::Taken taken = memory_.take(footprint(index), of(index).place());
    if (!taken.shortage.empty()) {
      if (!memory_.may_do_without()) report_exhausted(index, taken.shortage);
      return false;  // its use will evict what it must, and report what is missing
    }
    of(index).memory = std::move(taken.lease);
    start(index);
    return true;
  }
  // A pass begins. Units that are gathered already count as gathered in it.
  void begin_pass() {
    for (Slot& s : slots_) s.gathers = s.state == State::kReleased ? 0 : 1;
  }
  void drop(int index) {
    Slot& s = of(index);
    if (s.state == State::kReleased) return;
    if (s.state == State::kGathered) detach(index);
    if (unit(index).spec.tile()) std::erase(tiles_, index);
    s.work.reset();
    s.recording.reset();
    s.memory.reset();
    s.state = State::kReleased;
    live_ -= footprint(index);
  }
  // Gathers the weights of a gathered unit again, in place.
  void gather_again(int index) { gathers_.start(unit(index), flat(index))->wait(); }

  // Evicts unpinned units that are used later than `distance`; true if `bytes` fit then.
  bool make_room(Bytes bytes, std::int64_t distance) {
    while (live_ + bytes > options_.max_live) {
      const int evicted = farthest(bytes, distance);
      if (evicted < 0) return false;
      drop(evicted);
    }
    return true;
  }
  // Whether `bytes` may be prefetched even though they exceed the bound: only if they and all
  // unpinned units together have at most `least_ahead`, or no unit is unpinned. A unit that was
  // prefetched in vain stays until it is evicted for a unit in use.
  bool fits_ahead(Bytes bytes) const {
    if (options_.max_live_is_hard) return false;
    Bytes unpinned = bytes;
    for (const Unit& u : units_) {
      if (!u.whole && !released(u.id) && !pinned(u.id)) unpinned += footprint(u.id);
    }
    return unpinned <= std::max(least_ahead_, bytes);
  }
  // Releases unpinned units that are not used again within EngineOptions::max_reuse.
  // Called when a unit is used, not when one is released: at the release of forward's last unit we
  // cannot know that backward starts with it.
  void drop_what_is_not_reused_soon(int current) {
    std::vector<bool> soon(units_.size());
    Numel between;
    for (const int next : order_.upcoming()) {
      nth(soon, next) = true;
      if (next != current) between += unit(next).layout.used();
      if (between > *options_.max_reuse) break;
    }
    for (const Unit& u : units_) {
      const bool idle = !u.whole && gathered(u.id) && !pinned(u.id);
      if (idle && !nth(soon, u.id)) drop(u.id);
    }
  }
  // Releases the unpinned tiles, except `current`, which is used next, and, if that is no tile, one
  // that is being prefetched.
  void drop_idle_tiles(int current) {
    std::vector<int> idle;
    for (const int tile : tiles_) {
      // A tile that is gathered ahead while another tile is in use will not be used.
      const bool ahead = !gathered(tile) && !unit(current).spec.tile();
      if (tile != current && !pinned(tile) && !ahead) idle.push_back(tile);
    }
    for (const int tile : idle) drop(tile);
  }
  void evict_all() {
    for (const Unit& u : units_) {
      if (!u.whole && !pinned(u.id)) drop(u.id);
    }
  }
  GatherMemory::Pool& pool() { return memory_.pool(); }

  Bytes live() const { return live_; }  // of gathered units and those being gathered
  // The memory of a unit while it is gathered. All tiles take that of the largest one: buffers are
  // kept by size, and a shorter tile, such as the last one of a parameter, would keep its own.
  Bytes footprint(int index) const {
    const Unit& u = unit(index);
    const Bytes bytes = u.spec.tile() ? largest_tile_ : u.layout.flat_bytes();
    return align_up(std::max(bytes, Bytes(1)), memory::page_size());
  }

 private:
  enum class State { kReleased, kGathering, kGathered };
  struct Slot {
    State state = State::kReleased;
    int pins = 0;
    GatherMemory::Pool::Lease memory;
    std::unique_ptr<comm::Work> work;
    StepRecorder::Recording recording;  // of `work`
    // The memory of the last pass's first gather, and of its latest one after that: a pass like it
    // finds the unit at the same addresses.
    std::array<const device::Memory*, 2> places{};
    std::size_t gathers = 0;  // in this pass

    const device::Memory*& place() { return places.at(std::min(gathers, places.size() - 1)); }
  };

  // Takes memory for a unit in use, and evicts any unpinned unit that it must.
  GatherMemory::Pool::Lease take(int index) {
    const Bytes bytes = footprint(index);
    GatherMemory::Taken taken = memory_.take(bytes, of(index).place());
    if (taken.shortage.empty()) return std::move(taken.lease);
    // The device has less than the bound allows.
    if (live_.value == 0) throw OutOfMemoryError(taken.shortage);
    if (!memory_.may_do_without()) report_exhausted(index, taken.shortage);
    evict_all();
    taken = memory_.take(bytes, of(index).place());
    if (!taken.shortage.empty()) report_exhausted(index, taken.shortage);
    return std::move(taken.lease);
  }
  [[noreturn]] void report_exhausted(int index, const std::string& cause) const {
    std::string pinned_units;
    for (const Unit& u : units_) {
      if (u.whole || !pinned(u.id)) continue;
      pinned_units += fmt::format("{}'{}' ({})", pinned_units.empty() ? "" : ", ", u.name(),
                                  to_string(footprint(u.id)));
    }
    throw OutOfMemoryError(
        "the weights of unit '{}' cannot be gathered; in use at the same time and gathered: {}; {}",
        unit(index).name(), pinned_units.empty() ? "no other unit" : pinned_units, cause);
  }
  // The unit has its memory.
  void start(int index) {
    const Unit& u = unit(index);
    Slot& s = of(index);
    s.place() = s.memory.get();
    ++s.gathers;
    const Bytes bytes = u.layout.flat_bytes();
    live_ += footprint(index);
    s.state = State::kGathering;
    if (u.spec.tile()) tiles_.push_back(index);
    try {
      s.recording = recorder_.begin_transfer(Activity::kGather, index, bytes);
      s.work = gathers_.start(u, s.memory->bytes().first(bytes.size()));
    } catch (...) {
      drop(index);
      throw;
    }
    recorder_.started(s.recording, *s.work);
    ++recorder_.counts().gathers;
    recorder_.counts().gathered += bytes;
  }
  void finish(int index) {
    Slot& s = of(index);
    try {
      recorder_.measure(Activity::kGatherWait, index, [&] { s.work->wait(); });
    } catch (...) {
      drop(index);
      throw;
    }
    recorder_.end(std::exchange(s.recording, nullptr));
    s.work.reset();
    s.state = State::kGathered;
    views_.attach(index, flat(index));
  }
  // The pool gets another buffer for the one that is left to views, so that ranks whose scripts
  // hold others keep the same buffers.
  void detach(int index) {
    if (views_.held(index)) {
      std::shared_ptr<void> left = memory_.replace(of(index).memory);
      if (left != nullptr) {
        views_.leave(index, std::move(left));
        return;
      }
    }
    views_.detach(index);
  }
  // The unpinned unit that is used last, later than `distance`; -1: there is none. A unit of
  // `bytes` comes before all others, since its buffer will do; with a unit of another size, one
  // buffer would be freed and another one made.
  int farthest(Bytes bytes, std::int64_t distance) const {
    int result = -1;
    std::int64_t result_distance = distance;
    bool result_fits = false;
    for (const Unit& u : units_) {
      const Slot& s = of(u.id);
      if (u.whole || s.state == State::kReleased || s.pins > 0) continue;
      // A running prefetch is not thrown away for another prefetch.
      if (s.state == State::kGathering && distance >= 0) continue;
      const std::int64_t d = order_.distance(u.id);
      const bool fits = footprint(u.id) == bytes;
      if (d <= distance || (result_fits && !fits)) continue;
      if (d <= result_distance && fits == result_fits) continue;
      result = u.id;
      result_distance = d;
      result_fits = fits;
    }
    return result;
  }
  Slot& of(int unit) { return nth(slots_, unit); }
  const Slot& of(int unit) const { return nth(slots_, unit); }
  const Unit& unit(int index) const { return nth(units_, index); }

  const std::vector<Unit>& units_;
  ShardGather gathers_;
  ParameterViews& views_;
  StepRecorder& recorder_;
  const plan::FetchOrder& order_;
  const EngineOptions& options_;
  Bytes least_ahead_;
  GatherMemory memory_;
  std::vector<Slot> slots_;  // by unit
  std::vector<int> tiles_;   // that have memory
  Bytes largest_tile_;
  Bytes live_;
};

}  // namespace strata::engine
