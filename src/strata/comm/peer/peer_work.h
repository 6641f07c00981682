// Operations that peers have started on their streams, as Work. wait() makes the compute stream
// wait; the host does not. Threads: one. Ownership: shares link and reductions. Errors: CommError
// from wait(), once any rank has failed; a destructor waits, too, and drops it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "strata/comm/collectives.h"
#include "strata/comm/peer/peer_link.h"
#include "strata/comm/peer/peer_reduction.h"

namespace strata::comm {

// Complete when a stream of this rank has come to its end.
class StreamWork final : public Work {
 public:
  // `end` null: the compute stream waits for it already.
  StreamWork(std::shared_ptr<PeerLink> link, std::unique_ptr<device::Event> end,
             WorkTimes times = {});
  ~StreamWork() override;

  bool done() override { return end_ == nullptr || end_->done(); }
  void wait() override;
  WorkTimes times() const override { return times_; }

 private:
  void join();

  std::shared_ptr<PeerLink> link_;
  std::unique_ptr<device::Event> end_;
  WorkTimes times_;
};

// Complete when every rank has ended a round of gathers, which this one ends now. Not to wait for
// it is no error.
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

// Complete when the result is there and the peers have read this rank's contribution.
class ReductionWork final : public Work {
 public:
  // `reductions`: of `link`, and live no longer than it.
  ReductionWork(std::shared_ptr<PeerLink> link, std::shared_ptr<PeerReductions> reductions,
                PeerReductions::Started started, WorkTimes times);
  ~ReductionWork() override;

  bool done() override;
  void wait() override;
  WorkTimes times() const override { return times_; }

 private:
  void join();

  std::shared_ptr<PeerLink> link_;
  std::shared_ptr<PeerReductions> reductions_;
  PeerReductions::Started started_;  // no event: the compute stream waits already
  WorkTimes times_;
};

}  // namespace strata::comm
