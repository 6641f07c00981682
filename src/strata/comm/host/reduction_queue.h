// The reductions that this rank has started and not finished, oldest first. Starting one publishes
// where the contribution lies; the sum is made by pull_next(), which any later call of this rank
// runs as soon as all ranks have published theirs. So several reductions can be started before the
// first is waited for, and a rank that waits for anything meanwhile serves its peers. Threads:
// those of the RankLink. Errors: CommError through the link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/host/rank_link.h"

namespace strata {
class ThreadPool;
}

namespace strata::comm {

class ReductionQueue {
 public:
  ReductionQueue(RankLink& link, ThreadPool* pool) : link_(link), pool_(pool) {}

  // Returns the operation's number. Throws UsageError for arguments that do not fit together.
  std::uint64_t start(const Reduction& reduction, std::string_view tag);
  // Finishes the oldest one if every rank has published it; false when there is nothing to do.
  bool pull_next();
  // Waits until this rank has pulled every one it started.
  void drain();
  // Whether every rank has pulled operation `number`, so that its buffers are free again.
  bool complete(std::uint64_t number) { return link_.unfinished_by(number) == RankLink::kNobody; }
  void wait(std::uint64_t number);

 private:
  struct Pending {
    std::uint64_t number;
    Reduction reduction;
  };

  void pull(const Pending& pending);
  BufferView source_of(int rank, const Pending& pending);

  RankLink& link_;
  ThreadPool* pool_;
  std::deque<Pending> pending_;
  std::vector<BufferView> views_;  // of one pull; kept to save allocations
  std::vector<const std::byte*> sources_;
};

}  // namespace strata::comm
