// The small collectives: every rank puts a message in its mailbox, and when all have done so each
// rank reads all of them. A message larger than a mailbox takes several rounds. Threads: those of
// the RankLink. Errors: CommError through the link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "strata/comm/collectives.h"
#include "strata/comm/host/rank_link.h"
#include "strata/comm/host/reduction_queue.h"

namespace strata::comm {

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
