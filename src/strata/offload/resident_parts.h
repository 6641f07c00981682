// The parts of a drive's blocks that lie in memory now, each in a state, and their moves from one
// state to the next. A part is there once, and no two parts overlap.
//
//   drive -> reading -> kept or spare -> claimed -> lent -> settling -> writing -> kept or spare
//
// A settling part waits for the device's work on it, and for the next call: if that call leases the
// part again, it is not written in between. A kept part has a predicted next use, a spare part has
// none. A part that was only read is not written. Threads: one. Ownership: keeps blocks and file; a
// Place is valid until its part is dropped. Errors: a part whose read or write failed is dropped,
// and its error stays with its block; these functions throw none of them.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "strata/device/device.h"
#include "strata/memory/arena.h"
#include "strata/offload/block_file.h"
#include "strata/offload/drive_blocks.h"
#include "strata/offload/link_watch.h"

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
    bool claimed = false;   // is about to be leased: rests in kReserved
    bool changed = false;   // since it was read or written
    bool expected = false;  // has a predicted use: rests in kCached
    std::int64_t turn = 0;  // the turn of its predicted use
    std::int64_t used = 0;  // when it was leased last, or came
    bool ahead = false;     // was prefetched, and not leased yet
    std::unique_ptr<io::Transfer> transfer;
    std::unique_ptr<device::Event> event;
  };
  using List = std::list<Resident>;
  using Place = List::iterator;

  ResidentParts(std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file);
  ~ResidentParts();  // waits for reads, writes and device work
  ResidentParts(const ResidentParts&) = delete;
  ResidentParts& operator=(const ResidentParts&) = delete;

  List& in(State state) { return lists_[state]; }  // oldest in the state first
  std::optional<Place> find(const Part& part) const;
  std::vector<Place> overlapping(const Part& part) const;

  // The new part is in kReserved.
  Place insert(const Part& part, memory::Extent extent);
  void move(Place place, State state);
  void drop(Place place);
  void set_ahead(Place place, bool ahead);
  // The bytes of prefetched parts that were not leased yet.
  Bytes ahead_bytes() const { return ahead_bytes_; }
  // No work is under way on the part any more: moves it to kReserved, begins its write, or moves it
  // to kCached or kEvictable.
  void rest(Place place);
  // Reads the part, or fills it with zeroes if it was never written.
  void fill(Place place);
  // Takes back a leased part. `event` completes when the device has finished with it; null: it has.
  void settle(Place place, std::unique_ptr<device::Event> event);
  void lose_written(Place place, const std::string& why);
  // Waits for the work on it that its state means: reading, settling or writing.
  void finish(Place place);
  // Waits for all work on it, and drops it. It is neither lent nor claimed.
  void expel(Place place);
  // Begins and finishes all work that needs no wait.
  void advance();
  // The part of advance() that finishes writes.
  void collect();

  // The error of a write that no call has thrown yet; empty: none.
  std::string take_write_failure() { return std::exchange(write_failure_, {}); }
  StoreCounts& counts() { return counts_; }
  // Notified of every complete transfer; may be null.
  void watch(LinkWatch* watch) { watch_ = watch; }

 private:
  void finish_read(Place place);
  void finish_write(Place place);
  void finish_work(Place place);
  void begin_write(Place place);
  void tell(Link link, Place place, const io::Transfer& transfer);
  void lose_read(Place place, const std::string& why);

  const std::shared_ptr<DriveBlocks> blocks_;
  const std::shared_ptr<BlockFile> file_;
  std::array<List, kStates> lists_;  // by state
  std::map<Part, Place> places_;
  Bytes ahead_bytes_;
  std::string write_failure_;
  StoreCounts counts_;
  LinkWatch* watch_ = nullptr;
};

}  // namespace strata::offload
