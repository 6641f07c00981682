#include "strata/engine/gather/gathered_units.h"

#include <fmt/core.h>

#include <optional>
#include <utility>

#include "strata/base/error.h"
#include "strata/comm/agreement.h"

namespace strata::engine {
namespace {

// Goes when nothing that was queued uses it: no kernel of the model, and no gather, since the
// compute stream waits for each gather before the memory is given back.
class GatheredMemory final : public device::Memory {
 public:
  GatheredMemory(device::Device& device, Bytes bytes)
      : device_(device), memory_(device.allocate(bytes, memory::Kind::kGathered)) {}
  ~GatheredMemory() override {
    try {
      device_.compute_stream().synchronize();
    } catch (...) {  // the device has failed: each wait for its work throws that error
    }
  }
  std::span<std::byte> bytes() override { return memory_->bytes(); }

 private:
  device::Device& device_;
  std::unique_ptr<device::Memory> memory_;
};

// For a single rank: the upload of its own shard is the whole gather.
class UploadWork final : public comm::Work {
 public:
  UploadWork(std::unique_ptr<device::Event> uploaded, device::Device& device)
      : uploaded_(std::move(uploaded)), device_(device) {}
  ~UploadWork() override {
    try {
      UploadWork::wait();
    } catch (...) {  // the device has failed: each wait for its work throws that error
    }
  }
  bool done() override { return uploaded_ == nullptr || uploaded_->done(); }
  void wait() override {
    if (const auto uploaded = std::exchange(uploaded_, nullptr))
      device_.compute_stream().wait_for(*uploaded);
  }

 private:
  std::unique_ptr<device::Event> uploaded_;  // null: the compute stream waits for it already
  device::Device& device_;
};

}  // namespace

GatherMemory::GatherMemory(device::Device& device, comm::Collectives& collectives)
    : collectives_(collectives),
      ranks_(ranks_of(collectives)),
      pool_([&device](Bytes bytes) { return std::make_unique<GatheredMemory>(device, bytes); }) {}

GatherMemory::Taken GatherMemory::take(Bytes footprint) {
  if (ranks_ == Ranks::kAgree) return take_together(footprint);
  try {
    return {pool_.acquire(footprint), ""};
  } catch (const OutOfMemoryError& error) {
    return {{}, error.what()};
  }
}

GatherMemory::Taken GatherMemory::take_together(Bytes footprint) {
  if (pool_.has_cached(footprint)) return {pool_.acquire(footprint), ""};
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

std::shared_ptr<device::Memory> GatherMemory::replace(Pool::Lease& lease) {
  try {
    return pool_.replace(lease);
  } catch (const OutOfMemoryError&) {
    return nullptr;
  }
}

void ShardGather::upload(const Unit& unit, std::span<std::byte> own) {
  shards_.for_each(unit.id, Numel(), unit.layout.shard(), offload::Access::kRead,
                   [&](const WeightShards::Piece& piece) {
                     const std::span<std::byte> target = own.subspan(
                         bytes_of(piece.begin, unit.layout.dtype()).size(), piece.bytes.size());
                     watch_.copy(offload::Link::kUp, Bytes(target.size()), *uploads_,
                                 [&] { device_.copy(target, piece.bytes, *uploads_); });
                     if (piece.lease != nullptr) piece.lease->used_in(*uploads_);
                   });
}

std::unique_ptr<comm::Work> ShardGather::start(const Unit& unit, std::span<std::byte> flat) {
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
  if (place.count == 1) return std::make_unique<UploadWork>(uploads_->record(), device_);
  comm::SliceMap slices = unit.slices;
  slices.writer = uploads_.get();
  return collectives_.all_gather(slices, flat, unit.name());
}

GatheredUnits::GatheredUnits(const std::vector<Unit>& units, const WeightShards& shards,
                             comm::Collectives& collectives, device::Device& device,
                             ParameterViews& views, StepRecorder& recorder,
                             const plan::FetchOrder& order, const EngineOptions& options,
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

GatheredUnits::~GatheredUnits() {
  for (const Unit& u : units_) {
    Slot& s = of(u.id);
    s.work.reset();  // waits
    if (s.state != State::kGathered) continue;
    views_.let_go(u.id, [&] { return std::shared_ptr<device::Memory>(s.memory.release()); });
  }
}

void GatheredUnits::gather(int index) {
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

GatherMemory::Pool::Lease GatheredUnits::take(int index) {
  const Bytes bytes = footprint(index);
  GatherMemory::Taken taken = memory_.take(bytes);
  if (taken.shortage.empty()) return std::move(taken.lease);
  // The device has less than the bound allows.
  if (live_.value == 0) throw OutOfMemoryError(taken.shortage);
  if (!memory_.may_do_without()) report_exhausted(index, taken.shortage);
  evict_all();
  taken = memory_.take(bytes);
  if (!taken.shortage.empty()) report_exhausted(index, taken.shortage);
  return std::move(taken.lease);
}

void GatheredUnits::report_exhausted(int index, const std::string& cause) const {
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

bool GatheredUnits::start_ahead(int index) {
  GatherMemory::Taken taken = memory_.take(footprint(index));
  if (!taken.shortage.empty()) {
    if (!memory_.may_do_without()) report_exhausted(index, taken.shortage);
    return false;  // its use will evict what it must, and report what is missing
  }
  of(index).memory = std::move(taken.lease);
  start(index);
  return true;
}

// The unit has its memory.
void GatheredUnits::start(int index) {
  const Unit& u = unit(index);
  Slot& s = of(index);
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

void GatheredUnits::finish(int index) {
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

void GatheredUnits::drop(int index) {
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

// The pool gets another buffer for the one that is left to views, so that ranks whose scripts hold
// others keep the same buffers.
void GatheredUnits::detach(int index) {
  if (views_.held(index)) {
    std::shared_ptr<void> left = memory_.replace(of(index).memory);
    if (left != nullptr) {
      views_.leave(index, std::move(left));
      return;
    }
  }
  views_.detach(index);
}

bool GatheredUnits::make_room(Bytes bytes, std::int64_t distance) {
  while (live_ + bytes > options_.max_live) {
    const int evicted = farthest(bytes, distance);
    if (evicted < 0) return false;
    drop(evicted);
  }
  return true;
}

// The unpinned unit that is used last, later than `distance`; -1: there is none. A unit of `bytes`
// comes before all others, since its buffer will do; with a unit of another size, one buffer would
// be freed and another one made.
int GatheredUnits::farthest(Bytes bytes, std::int64_t distance) const {
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

bool GatheredUnits::fits_ahead(Bytes bytes) const {
  if (options_.max_live_is_hard) return false;
  Bytes unpinned = bytes;
  for (const Unit& u : units_) {
    if (!u.whole && !released(u.id) && !pinned(u.id)) unpinned += footprint(u.id);
  }
  return unpinned <= std::max(least_ahead_, bytes);
}

// Called when a unit is used, not when one is released: at the release of forward's last unit we
// cannot know that backward starts with it.
void GatheredUnits::drop_what_is_not_reused_soon(int current) {
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

void GatheredUnits::drop_idle_tiles(int current) {
  std::vector<int> idle;
  for (const int tile : tiles_) {
    // A tile that is gathered ahead while another tile is in use will not be used.
    const bool ahead = !gathered(tile) && !unit(current).spec.tile();
    if (tile != current && !pinned(tile) && !ahead) idle.push_back(tile);
  }
  for (const int tile : idle) drop(tile);
}

}  // namespace strata::engine
