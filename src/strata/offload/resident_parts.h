// The parts of a drive's blocks that lie in memory now, each in a state, and how they get from one
// to the next. A part is there once, and parts that overlap never at one time.
//
//   drive -> reading -> kept or spare -> claimed -> lent -> settling -> writing -> kept or spare
//
// Settling is the wait for the device's work on what was given back, and for the next call: what is
// lent again at once is not written in between. Kept is what somebody expects
// to need, spare what nobody does. A part that was only read skips the write. Threads: one.
// Ownership: keeps blocks and file; a Place is valid until the part goes. Errors: a part that could
// not be read or written goes, and its error is kept with its block; none is thrown.
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
  enum State : std::uint8_t { kReading, kKept, kSpare, kClaimed, kLent, kSettling, kWriting };
  static constexpr std::size_t kStates = 7;
  struct Resident {
    Part part;
    memory::Extent extent;  // whole pages
    State state = kClaimed;
    bool claimed = false;   // is about to be lent: comes to rest as that
    bool changed = false;   // since it was read or written
    bool expected = false;  // comes to rest as kept
    std::int64_t turn = 0;  // in which it is expected
    std::int64_t used = 0;  // when it was lent last, or came
    bool ahead = false;     // was read because it is expected, and was not lent yet
    std::unique_ptr<io::Transfer> transfer;
    std::unique_ptr<device::Event> event;
  };
  using List = std::list<Resident>;
  using Place = List::iterator;

  ResidentParts(std::shared_ptr<DriveBlocks> blocks, std::shared_ptr<BlockFile> file);
  ~ResidentParts();  // waits for what goes on
  ResidentParts(const ResidentParts&) = delete;
  ResidentParts& operator=(const ResidentParts&) = delete;

  List& in(State state) { return lists_[state]; }  // in the order in which they came to it
  std::optional<Place> find(const Part& part) const;
  std::vector<Place> overlapping(const Part& part) const;

  // Claimed.
  Place insert(const Part& part, memory::Extent extent);
  void move(Place place, State state);
  void drop(Place place);
  void set_ahead(Place place, bool ahead);
  // The bytes that were read ahead and wait to be lent.
  Bytes ahead_bytes() const { return ahead_bytes_; }
  // Nothing goes on with it any more: claimed, or on its way to the drive, or kept or spare.
  void rest(Place place);
  // Reads it, or makes it zeroes where it was never written.
  void fill(Place place);
  // Takes back what was lent. `event` comes when the device has done with it; null: it has.
  void settle(Place place, std::unique_ptr<device::Event> event);
  void lose_written(Place place, const std::string& why);
  // Waits for what goes on with it: reading, settling or writing.
  void finish(Place place);
  // Waits for all that goes on with it, and lets it go. It is neither lent nor claimed.
  void expel(Place place);
  // Begins and finishes what can be without waiting.
  void advance();
  // The part of advance() that finishes writes.
  void collect();

  // The error of a write that nobody was told yet; empty: none.
  std::string take_write_failure() { return std::exchange(write_failure_, {}); }
  StoreCounts& counts() { return counts_; }
  // Is told of every transfer that is complete; null: nobody is.
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
