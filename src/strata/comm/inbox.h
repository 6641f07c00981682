// Ranks write their contributions to reductions straight into the memory of the ranks that add them
// up, gradient by gradient: nothing is copied before it moves, and no rank pulls.
//
// Each rank's inbox is a ring: reductions take their room one behind the other, and room is used
// again after its content was added up. All ranks announce the same reductions in the same order,
// so each knows, without asking, where in the others' memory its contributions go.
//
// Threads: one thread of a rank. Ownership: the destructor frees the inbox's memory, and needs a
// barrier after the last reduction before it. Order: writes run in the stream of contributions.
// Errors: CommError, as from the collectives that made it; it may outlive them, unused.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/interface.h"
#include "strata/base/units.h"

namespace strata::comm {

struct Reduction;
class Work;

class Inbox : public Interface {
 public:
  // Announces the next reductions, by the bytes of a whole contribution to each, a slice for each
  // rank; none larger than the inbox, and the same on every rank. Forgets those announced before
  // that have not begun.
  virtual void expect(std::span<const Bytes> contributions) = 0;
  // Whether contribution `index` of these may be written yet: its room may belong to an earlier one
  // that this rank has not begun to reduce.
  virtual bool writable(std::size_t index) const = 0;
  // Writes `values` from element `begin` on; the contribution must be writable. The memory of
  // `values` may change after the work that the stream of contributions then holds.
  virtual void write(std::size_t index, Numel begin, std::span<const std::byte> values,
                     DType dtype) = 0;
  virtual void write_zero(std::size_t index, Numel begin, Numel numel, DType dtype) = 0;
  // Collective: adds up the written contributions as reduce_scatter() does; elements that no rank
  // wrote are undefined. Writes the result in the stream of reductions, behind what the stream of
  // contributions holds. `source`, its offset and `writer` have no meaning here. Reductions are
  // called in the order of expect().
  virtual std::unique_ptr<Work> reduce(std::size_t index, const Reduction& reduction,
                                       std::string_view tag) = 0;
};

// The offsets of the contributions to coming reductions in an inbox, and the reduction for which
// each has to wait. Pure arithmetic, the same on every rank. Reductions have numbers that grow,
// from 1.
class InboxRing {
 public:
  explicit InboxRing(Bytes bytes) : bytes_(bytes) {}

  void expect(std::span<const Bytes> contributions);
  std::size_t size() const { return rooms_.size(); }
  Bytes offset(std::size_t index) const { return rooms_[index].begin; }
  Bytes bytes(std::size_t index) const { return rooms_[index].end - rooms_[index].begin; }
  // The reduction that every rank must have read before this room is written; 0: none; nullopt if
  // that reduction has not begun.
  std::optional<std::uint32_t> after(std::size_t index) const;
  void begun(std::size_t index, std::uint32_t number);

 private:
  struct Room {
    Bytes begin;
    Bytes end;
    std::optional<std::size_t> blocker;  // the last one before it that shares memory with it
    std::uint32_t number = 0;            // 0: not begun
  };
  Bytes bytes_;
  std::vector<Room> rooms_;
  std::uint32_t last_ = 0;    // that has begun
  std::uint32_t before_ = 0;  // ... before what is expected now
  Bytes next_;                // behind the last room that has begun
};

inline void InboxRing::expect(std::span<const Bytes> contributions) {
  rooms_.clear();
  before_ = last_;
  Bytes at = next_;
  for (const Bytes bytes : contributions) {
    STRATA_ASSERT(bytes <= bytes_);
    if (at + bytes > bytes_) at = Bytes();
    Room room{at, at + bytes, std::nullopt, 0};
    for (std::size_t i = rooms_.size(); i-- > 0 && !room.blocker;) {
      if (rooms_[i].begin < room.end && room.begin < rooms_[i].end) room.blocker = i;
    }
    rooms_.push_back(room);
    at = room.end;
  }
}

// All that began earlier counts as in the way of what shares memory with nothing expected: it was
// read long ago.
inline std::optional<std::uint32_t> InboxRing::after(std::size_t index) const {
  const Room& room = rooms_[index];
  if (!room.blocker) return before_;
  const std::uint32_t number = rooms_[*room.blocker].number;
  return number == 0 ? std::nullopt : std::optional(number);
}

inline void InboxRing::begun(std::size_t index, std::uint32_t number) {
  rooms_[index].number = number;
  last_ = number;
  next_ = rooms_[index].end;
}

}  // namespace strata::comm
