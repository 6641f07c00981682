// The operations of one rank of a host over its RankLink: reductions, which go on beside the rank's
// other work, and messages, which are exchanged in rounds.
// Threads: those of the RankLink. Errors: CommError through the link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <string>
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

// The small collectives: every rank puts a message in its mailbox, and when all have done so each
// rank reads all of them. A message larger than a mailbox takes several rounds. Threads: those of
// the RankLink. Errors: CommError through the link.
class MessageRounds {
 public:
  MessageRounds(RankLink& link, ReductionQueue& reductions)
      : link_(link), reductions_(reductions) {}

  void all_reduce(std::span<double> values, ReduceOp op);
  void broadcast(std::span<std::byte> bytes, int root);
  std::vector<std::string> all_gather_text(const std::string& text);
  void barrier();

 private:
  using Read = std::function<void(int rank, const OperationEntry&, std::span<const std::byte>)>;

  // One operation. Reductions that were started before it are pulled first, so that no rank waits
  // here for one that waits for this rank's part of a reduction.
  void round(OperationEntry entry, std::span<const std::byte> message, const Read& read);
  void all_reduce_part(std::span<double> values, ReduceOp op, std::int64_t total);

  RankLink& link_;
  ReductionQueue& reductions_;
  std::uint64_t rounds_ = 0;
};

}  // namespace strata::comm
