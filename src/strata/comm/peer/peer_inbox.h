// The inbox of ranks whose devices reach each other's memory: pushes by copy engines, on the one
// stream of transfers. A rank's flags say what it has written for each peer, and what it has added
// up and others may overwrite; they are those of the reductions that pull, and count with them.
// Threads, errors: inbox.h. Ownership: shares link and reductions.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/inbox.h"
#include "strata/comm/peer/peer_link.h"
#include "strata/comm/peer/peer_reduction.h"

namespace strata::comm {

class PeerInbox final : public Inbox {
 public:
  // `memory`: of these peers. `records_times`: whether works tell when their bytes moved.
  PeerInbox(std::shared_ptr<PeerLink> link, std::shared_ptr<PeerReductions> reductions,
            std::unique_ptr<SharedBuffer> memory, std::shared_ptr<const bool> records_times);

  void expect(std::span<const Bytes> contributions) override;
  bool writable(std::size_t index) const override { return ring_.after(index).has_value(); }
  void write(std::size_t index, Numel begin, std::span<const std::byte> values,
             DType dtype) override;
  void write_zero(std::size_t index, Numel begin, Numel numel, DType dtype) override;
  std::unique_ptr<Work> reduce(std::size_t index, const Reduction& reduction,
                               std::string_view tag) override;

 private:
  // Has the transfers wait for the room on every rank, once.
  void open(std::size_t index);
  // The parts of elements' bytes [begin, end) by owner: calls part(owner, target, first, bytes),
  // `first` counted from `begin`.
  template <typename Part>
  void by_owner(std::size_t index, Bytes begin, Bytes end, Part&& part);
  std::byte* base_of(int rank);
  Bytes slice_of(std::size_t index) const;

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<PeerReductions> reductions_;
  std::unique_ptr<SharedBuffer> memory_;
  std::shared_ptr<const bool> records_times_;
  InboxRing ring_;
  std::vector<bool> opened_;       // by index
  std::vector<std::byte*> bases_;  // by rank; null: not reached yet
};

}  // namespace strata::comm
