// The parts of a drive's blocks that lie in memory now, each in a state. Only this class changes
// states. A part is resident at most once; resident parts never overlap.
//
//   drive -> reading -> cached or evictable -> reserved -> leased -> draining -> writing
//                                                                -> cached or evictable
//
// Each state has one meaning (docs/GLOSSARY.md). A draining part waits for the device's work on it,
// and for the next call: if that call leases the part again, it is not written in between. A part
// that was only read is not written. A part whose read or write failed is dropped.
//
// Threads: one. Ownership: keeps blocks and file; a Place is valid until its part is dropped.
// Errors: the error of a part stays with its block; these functions throw none of them.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strata/device/device.h"
#include "strata/memory/arena.h"
#include "strata/offload/block_file.h"
#include "strata/offload/drive_blocks.h"
#include "strata/offload/state_store.h"

namespace strata::offload {

class ResidentParts {
 public:
  enum State : std::uint8_t {
    kReading,
    kCached,
    kEvictable,
    kReserved,
    kLeased,
    kDraining,
    kWriting
  };
  static constexpr std::size_t kStates = 7;
  struct Resident {
    Part part;
    memory::Extent extent;  // whole pages
    State state = kReserved;
    bool reserved = false;        // a call is about to lease it
    bool changed = false;         // since it was read or written
    bool predicted = false;       // it has a predicted use
    bool prefetched = false;      // and was not leased yet
    std::int64_t prediction = 0;  // the number of its predicted use
    std::int64_t last_lease = 0;  // leases() when it was leased last, or came
    std::unique_ptr<io::Transfer> transfer;
    std::unique_ptr<device::Event> event;
  };
  using List = std::list<Resident>;
  using Place = List::const_iterator;

  ResidentParts(std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file);
  ~ResidentParts();  // waits for reads, writes and device work
  ResidentParts(const ResidentParts&) = delete;
  ResidentParts& operator=(const ResidentParts&) = delete;

  const List& in(State state) const { return lists_[state]; }  // oldest in the state first
  std::optional<Place> find(const Part& part) const;
  std::vector<Place> overlapping(const Part& part) const;
  Bytes prefetched_bytes() const { return prefetched_bytes_; }  // of parts that are `prefetched`
  std::int64_t leases() const { return leases_; }               // of parts, so far

  // Brings a new part into memory: reads it, or fills it with zeroes if it was never written. It is
  // reserved, or else prefetched with a predicted use.
  void read_reserved(const Part& part, memory::Extent extent);
  void prefetch(const Part& part, memory::Extent extent);
  // A reserved part keeps its memory. It is in kReserved when the work on it has ended.
  void reserve(Place place, bool reserved);
  void lease(Place place);  // from kReserved
  // Takes back a leased part. `event` completes when the device has finished with it; null: it has.
  void give_back(Place place, Access access, std::unique_ptr<device::Event> event);
  void predict(Place place);  // a use after all predicted so far
  void forget(Place place);   // its use is not predicted any more
  // Waits for the work on the part that its state means: reading, draining or writing.
  void finish(Place place);
  // Waits for all work on the part, and drops it. It is neither leased nor reserved.
  void evict(Place place);
  // The part's content is lost. `why`: the error, for take_write_failure().
  void lose_written(Place place, const std::string& why);

  // Begins and finishes all work that needs no wait.
  void advance();
  // The part of advance() that finishes writes.
  void collect_writes();
  void flush();  // waits until all returned parts are written

  // The error of a write that no call has thrown yet; empty: none.
  std::string take_write_failure() { return std::exchange(write_failure_, {}); }
  StoreCounts& counts() { return counts_; }
  // Notified of every complete transfer; may be null.
  void watch(LinkWatch* watch) { watch_ = watch; }

 private:
  static Resident& at(Place place) { return const_cast<Resident&>(*place); }
  Place insert(const Part& part, memory::Extent extent);
  void move(Place place, State state);
  void drop(Place place);
  void set_prefetched(Place place, bool prefetched);
  void fill(Place place);
  void end_work(Place place);
  void begin_write(Place place);
  void count_transfer(Link link, Place place, const io::Transfer& transfer);
  void lose_read(Place place, const std::string& why);

  const std::shared_ptr<DriveBlocks> blocks_;
  const std::shared_ptr<BlockFile> file_;
  std::array<List, kStates> lists_;  // by state
  std::map<Part, Place> places_;
  Bytes prefetched_bytes_;
  std::int64_t leases_ = 0;
  std::int64_t predictions_ = 0;
  std::string write_failure_;
  StoreCounts counts_;
  LinkWatch* watch_ = nullptr;
};

}  // namespace strata::offload
