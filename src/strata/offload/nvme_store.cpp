#include "strata/offload/nvme_store.h"

#include <chrono>
#include <iterator>
#include <utility>

#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/offload/resident_parts.h"

namespace strata::offload {
namespace {

using Clock = std::chrono::steady_clock;
using enum ResidentParts::State;

// Adds the time of its life.
class Stopwatch : NonCopyable {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  double& seconds_;
  const Clock::time_point begin_;
};

std::vector<Bytes> sizes_of(std::span<const Part> parts) {
  std::vector<Bytes> sizes;
  for (const Part& part : parts) sizes.push_back(align_up(part.bytes(), kPartAlignment));
  return sizes;
}

// Lends parts of a drive's blocks in the staging arena. This class decides which part gets memory;
// ResidentParts changes the states. When the arena needs room, the cache first evicts parts without
// a predicted use, then waits for a write to end, and last evicts the part with the farthest
// predicted use.
//
// Callers use parts in rounds. So the next use of the part that was used last is the farthest, and
// that part goes first among those without a predicted use; but a part that was not used for two
// rounds goes before it. This keeps a share of the parts from round to round. Prefetched parts hold
// at most a third of the arena, or one part that is larger.
//
// The cache writes a returned part in the first later call that finds the device's work on it done,
// unless that call leases the part again. Threads: one at a time; it has none of its own.
// Ownership: each lease keeps the cache alive; the device outlives both. Errors: the cache stores
// an error with its block and never lends that block again. The next lease() or flush() also throws
// the error of a write.
class PartCache final : public StagingArena::Holder {
 public:
  using Place = ResidentParts::Place;

  // The blocks' bookkeeping and their file are shared with the store that adds blocks.
  PartCache(device::Device& device, std::shared_ptr<StagingArena> arena,
            std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file)
      : device_(device),
        arena_(std::move(arena)),
        blocks_(std::move(blocks)),
        resident_(blocks_, std::move(file)) {
    arena_->join(*this);
  }
  // waits for transfers under way
  ~PartCache() override { arena_->leave(*this); }

  // Leases all parts or none, in their order, and waits until they are in memory. The parts are not
  // empty and do not overlap.
  std::vector<Place> lease(std::span<const Part> parts) {
    resident_.collect_writes();
    require_lendable(parts);
    const Stopwatch stopwatch(resident_.counts().seconds_waited);
    for (const Part& part : parts) {
      for (const Place place : resident_.overlapping(part)) {
        if (place->part != part) resident_.evict(place);
      }
    }
    const Reservation reservation(*this, parts);
    advance();
    const auto ready =
        std::ranges::count_if(parts, [this](const Part& part) { return is_ready(part); });
    read_missing(parts, reservation);
    std::vector<Place> places;
    for (const Part& part : parts) places.push_back(wait_for(part));
    for (const Place place : places) resident_.lease(place);
    resident_.counts().parts += static_cast<std::int64_t>(parts.size());
    resident_.counts().parts_ready += ready;
    return places;
  }
  static std::span<std::byte> bytes_of(Place place) {
    return place->extent.bytes().first(place->part.bytes().size());
  }
  // `used`: an event after the last use; null: the compute stream holds it.
  void give_back(Place place, Access access, std::unique_ptr<device::Event> used) noexcept {
    try {
      if (used == nullptr && device_.runs_ahead()) used = device_.compute_stream().record();
      resident_.give_back(place, access, std::move(used));
    } catch (const std::exception& error) {
      resident_.lose_written(place, error.what());
    }
  }

  // Predicts a use of the part soon, after all uses predicted before. Begins to read it if there is
  // room beside the parts with a predicted use. False: there is none now, and none for a later part
  // either.
  bool predict(const Part& part) {
    if (!blocks_->good(part.block)) return false;
    if (const auto there = resident_.find(part)) {
      const Place place = *there;
      if (place->predicted || place->reserved || place->state == kLeased) return false;
      resident_.predict(place);
      return true;
    }
    if (!resident_.overlapping(part).empty()) return false;
    const Bytes pages = align_up(part.bytes(), kPartAlignment);
    const Bytes ahead = resident_.prefetched_bytes();
    if (ahead.value > 0 && ahead + pages > arena_->ahead_share()) return false;
    auto extent = arena_->take_spare(pages, *this);
    if (!extent) return false;
    resident_.prefetch(part, std::move(*extent));
    return true;
  }
  // the part's use is not predicted any more
  void forget(const Part& part) {
    if (const auto there = resident_.find(part)) resident_.forget(*there);
  }
  // How many parts are leased from one use of a part to its next; 0: unknown.
  void set_round(std::int64_t parts) { round_ = parts; }

  void advance() { resident_.advance(); }
  void flush() {
    resident_.flush();
    if (blocks_->first_failure().empty()) return;
    resident_.take_write_failure();  // the error below reports it
    throw IoError(blocks_->first_failure());
  }
  bool free_memory(StagingArena::Effort effort) override {
    using enum StagingArena::Effort;
    if (effort == kReadAgain) return evict_farthest();
    if (effort == kNone) {
      advance();
      return evict_unpredicted();
    }
    for (const auto state : {kWriting, kDraining}) {
      if (resident_.in(state).empty()) continue;
      resident_.finish(resident_.in(state).begin());
      return true;
    }
    return false;
  }
  StoreCounts counts() { return resident_.counts(); }
  void watch(LinkWatch* watch) { resident_.watch(watch); }

 private:
  // Keeps parts that are in memory from eviction for the others of the same call.
  class Reservation : NonCopyable {
   public:
    Reservation(PartCache& cache, std::span<const Part> parts) : cache_(cache), parts_(parts) {
      set(true);
    }
    ~Reservation() { set(false); }

    void set(bool reserved) const {
      for (const Part& part : parts_) {
        if (const auto place = cache_.resident_.find(part))
          cache_.resident_.reserve(*place, reserved);
      }
    }

   private:
    PartCache& cache_;
    const std::span<const Part> parts_;
  };
  void require_lendable(std::span<const Part> parts) {
    if (const std::string failure = resident_.take_write_failure(); !failure.empty())
      throw IoError(failure);
    for (const Part& part : parts) {
      blocks_->require_good(part.block);
      for (const Place place : resident_.overlapping(part)) {
        if (place->state == kLeased) throw_leased(place->part, blocks_->name_of(part.block));
      }
    }
  }
  bool is_ready(const Part& part) const {
    const auto place = resident_.find(part);
    if (!place) return !blocks_->written(part);
    return (*place)->state == kReserved ||
           ((*place)->state == kReading && (*place)->transfer->done());
  }
  // Takes room for the missing parts and starts reading them.
  void read_missing(std::span<const Part> parts, const Reservation& reservation) {
    std::vector<Part> missing;
    std::ranges::copy_if(parts, std::back_inserter(missing),
                         [this](const Part& part) { return !resident_.find(part); });
    if (missing.empty()) return;
    auto extents = arena_->take_together(sizes_of(missing), this);
    if (!extents && missing.size() < parts.size()) {
      // The parts in memory fragment the free room. Without them, room for all parts is found
      // together.
      reservation.set(false);
      for (const Part& part : parts) {
        if (const auto place = resident_.find(part)) resident_.evict(*place);
      }
      missing.assign(parts.begin(), parts.end());
      extents = arena_->take_together(sizes_of(missing), this);
    }
    if (!extents) throw_no_room(parts);
    for (std::size_t i = 0; i < missing.size(); ++i)
      resident_.read_reserved(missing[i], std::move((*extents)[i]));
  }
  Place wait_for(const Part& part) {
    while (true) {
      blocks_->require_good(part.block);
      const auto place = resident_.find(part);
      STRATA_ASSERT(place);
      if ((*place)->state == kReserved) return *place;
      resident_.finish(*place);
    }
  }
  bool evict_unpredicted() {
    const ResidentParts::List& evictable = resident_.in(kEvictable);
    if (evictable.empty()) return false;
    const bool stale =
        round_ == 0 || resident_.leases() - evictable.front().last_lease > 2 * round_;
    resident_.evict(stale ? evictable.begin() : std::prev(evictable.end()));
    return true;
  }
  bool evict_farthest() {
    std::optional<Place> farthest;
    for (const auto state : {kCached, kReading}) {
      const ResidentParts::List& list = resident_.in(state);
      for (Place place = list.begin(); place != list.end(); ++place) {
        if (!place->reserved && (!farthest || place->prediction > (*farthest)->prediction))
          farthest = place;
      }
    }
    if (!farthest) return false;
    resident_.evict(*farthest);
    return true;
  }
  [[noreturn]] void throw_no_room(std::span<const Part> parts) {
    Bytes wanted;
    for (const Bytes size : sizes_of(parts)) wanted += size;
    Bytes lent;
    for (const auto& resident : resident_.in(kLeased))
      lent += Bytes(resident.extent.bytes().size());
    throw UsageError(
        "the memory that states on a drive are staged through has no room for what is fetched: {} "
        "wanted beside {} that are leased, of {}; fetch what is needed at once in one call, in "
        "parts of lease_budget() in all, or raise the budget",
        to_string(wanted), to_string(lent), to_string(arena_->budget()));
  }

  device::Device& device_;
  const std::shared_ptr<StagingArena> arena_;
  const std::shared_ptr<DriveBlocks> blocks_;
  ResidentParts resident_;
  std::int64_t round_ = 0;  // 0: unknown
};

class PartLease final : public Lease {
 public:
  PartLease(std::shared_ptr<PartCache> cache, Access access)
      : cache_(std::move(cache)), access_(access) {}
  ~PartLease() override {
    if (place_) cache_->give_back(*place_, access_, std::move(used_));
  }
  void hold(PartCache::Place place) noexcept { place_ = place; }
  std::span<std::byte> bytes() override {
    return place_ ? PartCache::bytes_of(*place_) : std::span<std::byte>();
  }
  void used_in(device::Stream& stream) override { used_ = stream.record(); }

 private:
  const std::shared_ptr<PartCache> cache_;
  std::optional<PartCache::Place> place_;  // nullopt: nothing is lent yet, or the part is empty
  const Access access_;
  std::unique_ptr<device::Event> used_;  // null: in the compute stream
};

class NvmeStore final : public StateStore {
 public:
  NvmeStore(device::Device& device, NvmeStoreOptions options)
      : arena_(std::move(options.arena)),
        file_(std::move(options.file)),
        blocks_(std::make_shared<DriveBlocks>(device.ledger(), options.verify)),
        cache_(std::make_shared<PartCache>(device, arena_, blocks_, file_)),
        read_ahead_(options.read_ahead) {
    file_->expect_memory(arena_->memory());
  }
  memory::Tier tier() const override { return memory::Tier::kNvme; }
  std::vector<BlockId> add_all(std::vector<BlockSpec> blocks) override {
    Bytes more;
    for (const BlockSpec& spec : blocks) {
      STRATA_ASSERT(spec.bytes.value >= 0);
      more += align_up(spec.bytes, kPartAlignment);
    }
    file_->grow(blocks_->end() + more);
    std::vector<BlockId> ids;
    ids.reserve(blocks.size());
    try {
      for (BlockSpec& spec : blocks) ids.push_back(blocks_->add(std::move(spec)));
    } catch (...) {
      take_back(ids);
      throw;
    }
    return ids;
  }
  void take_back(std::span<const BlockId> added) noexcept override {
    blocks_->remove_last(added.size());
  }
  Bytes size_of(BlockId block) const override { return blocks_->size_of(block); }
  std::vector<std::unique_ptr<Lease>> fetch_all(std::span<const Part> parts,
                                                Access access) override {
    require_apart(parts);
    std::vector<Part> staged;
    std::vector<std::unique_ptr<Lease>> leases;
    std::vector<PartLease*> lent;
    // All leases exist before the cache lends any part, so each lent part has an owner at once.
    for (const Part& part : parts) {
      require_part(part, blocks_->name_of(part.block), blocks_->size_of(part.block));
      auto lease = std::make_unique<PartLease>(cache_, access);
      if (part.bytes().value > 0) {
        staged.push_back(part);
        lent.push_back(lease.get());
      }
      leases.push_back(std::move(lease));
    }
    const std::vector<PartCache::Place> places = cache_->lease(staged);
    for (std::size_t i = 0; i < places.size(); ++i) lent[i]->hold(places[i]);
    for (const Part& part : staged) {
      for (const Part& dropped : sequence_.record(part)) cache_->forget(dropped);
    }
    cache_->set_round(sequence_.round());
    prefetch();
    return leases;
  }
  // StagingArena::lease_share(). While nothing else is leased, one fetch may lease more.
  Bytes lease_budget(BlockId /*block*/) const override { return arena_->lease_share(); }
  void advance() override {
    cache_->advance();
    prefetch();
  }
  void flush() override { cache_->flush(); }
  StoreCounts counts() const override { return cache_->counts(); }
  void watch(LinkWatch* watch) override { cache_->watch(watch); }
  std::vector<DriveWrites> drive_writes() const override { return file_->drive_writes(); }
  DriveLimit measure_drives() override { return measure_drive(*file_, blocks_->end()); }

 private:
  void prefetch() {
    if (!read_ahead_) return;
    for (auto next = sequence_.following(); next && cache_->predict(*next);
         next = sequence_.following())
      sequence_.predict_following();
  }

  const std::shared_ptr<StagingArena> arena_;
  const std::shared_ptr<BlockFile> file_;
  const std::shared_ptr<DriveBlocks> blocks_;
  const std::shared_ptr<PartCache> cache_;
  const bool read_ahead_;
  FetchSequence sequence_;
};

}  // namespace

std::unique_ptr<StateStore> make_nvme_store(device::Device& device, NvmeStoreOptions options) {
  return std::make_unique<NvmeStore>(device, std::move(options));
}

}  // namespace strata::offload
