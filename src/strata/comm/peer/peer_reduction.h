// Reductions between devices that reach each other's memory: each rank adds up its slice of all
// contributions, reading its peers' where they lie, all on one stream: of streams that wait the
// device's scheduler makes every kernel's launch longer, the model's, too.
// Threads, errors: collectives.h.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "strata/comm/peer/peer_link.h"

namespace strata::comm {

class PeerReductions {
 public:
  explicit PeerReductions(PeerLink& link) : link_(link) {}

  struct Started {
    std::unique_ptr<device::Event> added;  // the result is there
    std::uint32_t number = 0;              // of the reduction, for the functions below
  };
  // Collective. `times`: null if they are not wanted.
  Started start(const Reduction& reduction, std::string_view tag, WorkTimes* times);

  using Sources = std::vector<const std::byte*>;  // this rank's slice of each rank's contribution
  // Collective: of contributions that their ranks write into this rank's memory, on their streams
  // of transfers, before they come here.
  Started start_arrived(const Reduction& reduction, const Sources& here, WorkTimes* times);

  // Whether the peers have read this rank's contribution to the first `number` reductions; and has
  // the compute stream wait until they have.
  bool read_by_all(std::uint32_t number) const;
  void wait_for_readers(std::uint32_t number);
  std::uint32_t count() const { return count_; }

 private:
  Sources sources_of(const Reduction& reduction, std::string_view what);
  // The waits around the additions: begin() waits for every rank's contribution, and end() tells
  // every rank that the result is there.
  void begin(device::Stream& writer, WorkTimes* times);
  Started end(WorkTimes* times);
  void add(const Reduction& reduction, const Sources& sources);

  PeerLink& link_;
  std::uint32_t count_ = 0;
};

}  // namespace strata::comm
