// Reductions between devices that reach each other's memory: each rank copies its slice of every
// peer's contribution, in pieces, into a ring of two places, and adds them up on a stream of its
// own while the next pieces come.
// Threads, errors: collectives.h. Ownership: the ring is made at the first reduction and kept.
#pragma once

#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "strata/comm/peer_link.h"

namespace strata::comm {

class PeerReductions {
 public:
  explicit PeerReductions(PeerLink& link) : link_(link) {}

  // Collective. The event: the result is there and nobody reads this rank's contribution any more.
  // `times`: null where nobody asks for them.
  std::unique_ptr<device::Event> start(const Reduction& reduction, std::string_view tag,
                                       WorkTimes* times);

 private:
  struct Place {
    std::span<std::byte> memory;           // a piece for each peer
    std::unique_ptr<device::Event> added;  // null: never used
  };
  using Sources = std::vector<const std::byte*>;  // this rank's slice of each rank's contribution

  Sources sources_of(const Reduction& reduction, std::string_view what);
  void make_ring();
  void add_piece(const Reduction& reduction, const Sources& sources, std::size_t begin,
                 std::size_t numel, bool first, WorkTimes* times);
  std::unique_ptr<device::Event> release();

  PeerLink& link_;
  std::uint32_t count_ = 0;
  std::unique_ptr<device::Memory> ring_;
  std::array<Place, 2> places_;
  std::size_t turn_ = 0;
};

}  // namespace strata::comm
