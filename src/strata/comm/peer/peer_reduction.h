// Reductions between devices that reach each other's memory: each rank adds up its slice of all
// contributions, reading its peers' where they lie, all on one stream: of streams that wait the
// device's scheduler makes every kernel's launch longer, the model's, too.
// Threads, errors: collectives.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/inbox.h"
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
  // The waits around the additions: begin() waits for every rank's contribution, and end()
  // notifies every rank that the result is there.
  void begin(device::Stream& writer, WorkTimes* times);
  Started end(WorkTimes* times);
  void add(const Reduction& reduction, const Sources& sources);

  PeerLink& link_;
  std::uint32_t count_ = 0;
};

// An operation that peers have started on their streams, as Work: complete when a stream of this
// rank has come to its end and, for a reduction, the peers have read this rank's contribution.
// wait() makes the compute stream wait; the host does not. Threads: one. Ownership: shares link and
// reductions. Errors: CommError from wait(), once any rank has failed; a destructor waits, too, and
// drops it.
class PeerWork final : public Work {
 public:
  // `end` null: the compute stream waits for it already.
  PeerWork(std::shared_ptr<PeerLink> link, std::unique_ptr<device::Event> end, WorkTimes times = {})
      : PeerWork(std::move(link), nullptr, {std::move(end), 0}, std::move(times)) {}
  // `reductions`: of `link`, and live no longer than it.
  PeerWork(std::shared_ptr<PeerLink> link, std::shared_ptr<PeerReductions> reductions,
           PeerReductions::Started started, WorkTimes times);
  ~PeerWork() override;

  bool done() override;
  void wait() override;
  WorkTimes times() const override { return times_; }

 private:
  void join();

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<PeerReductions> reductions_;  // null: not a reduction
  PeerReductions::Started started_;             // no event: the compute stream waits already
  WorkTimes times_;
};

// Complete when every rank has ended a round of gathers, which this one ends now. Not to wait for
// it is no error. Threads, ownership, errors: as PeerWork.
class RoundWork final : public Work {
 public:
  RoundWork(std::shared_ptr<PeerLink> link, std::uint32_t round);

  bool done() override;
  void wait() override;

 private:
  std::shared_ptr<PeerLink> link_;
  std::uint32_t round_;
  std::unique_ptr<device::Event> own_;  // the end of this rank's gathers
  bool waits_ = false;                  // the compute stream
};

// The inbox of ranks whose devices reach each other's memory: pushes by copy engines, on the one
// stream of transfers. A rank's flags say what it has written for each peer, and what it has added
// up and others may overwrite; they are those of the reductions that pull, and count with them.
// Threads, errors: inbox.h. Ownership: shares link and reductions.
class PeerInbox final : public Inbox {
 public:
  // `memory`: of these peers. `records_times`: whether works know when their bytes moved.
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
