#include "strata/comm/inbox.h"

#include "strata/base/error.h"

namespace strata::comm {

void InboxRing::expect(std::span<const Bytes> contributions) {
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
std::optional<std::uint32_t> InboxRing::after(std::size_t index) const {
  const Room& room = rooms_[index];
  if (!room.blocker) return before_;
  const std::uint32_t number = rooms_[*room.blocker].number;
  return number == 0 ? std::nullopt : std::optional(number);
}

void InboxRing::begun(std::size_t index, std::uint32_t number) {
  rooms_[index].number = number;
  last_ = number;
  next_ = rooms_[index].end;
}

}  // namespace strata::comm
