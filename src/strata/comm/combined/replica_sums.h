// The reductions of one rank in shard groups, from the reduce-scatter inside the group to the sum
// over the replicas. Steps of one, each started when the one before is complete:
//   inside     adds up the group's contributions
//   summing    adds up the replicas' slices, or a part of them
//   gathering  the parts, where replicas do not read each other's memory and want them all
// start() brings every earlier reduction one step further, oldest first; finish() brings them to
// their end. So operations across follow each other in the order of reductions on every rank, and
// between the others in the same way wherever ranks make the same calls.
//
// Threads: one. Ownership: shares the parts, owns the scratch memory. Errors: those of the parts.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "strata/comm/collectives.h"

namespace strata::comm {

class ReplicaSums {
 public:
  // `owns_part`: this rank wants no more of the sum than its part.
  ReplicaSums(Collectives& inside, Collectives& across, device::Device& device, bool owns_part);

  struct Started {
    std::uint64_t number = 0;
    WorkTimes times;  // of the part inside
  };
  Started start(const Reduction& reduction, std::string_view tag);

  bool complete(std::uint64_t number) const;
  // Does what can be done for it without an operation across.
  bool poll(std::uint64_t number);
  void wait_for_readers(std::uint64_t number);
  // Completes the reductions up to this one; without one, all.
  void finish(std::uint64_t number);
  void finish_all();

 private:
  enum class Step { kInside, kSumming, kGathering, kComplete };
  // A slice in fp32 that replicas may read, and where the sums of parts meet.
  struct Scratch {
    std::unique_ptr<SharedBuffer> terms;
    std::unique_ptr<SharedBuffer> sums;  // null where no parts are gathered
  };
  struct Pending {
    std::uint64_t number = 0;
    Reduction reduction;
    std::string tag;
    std::unique_ptr<Scratch> scratch;
    Step step = Step::kInside;
    std::unique_ptr<Work> work;  // of the step
  };

  std::unique_ptr<Scratch> take(Numel numel);
  Numel part_of(Numel numel) const;
  // The elements that the group's reduction gives this rank, for a result of `numel` elements.
  Numel inside_of(Numel numel) const { return owns_part_ ? numel * replicas_ : numel; }
  bool gathers() const { return !owns_part_ && !replicas_read_each_other_; }
  // The next step begins when the work of the present one is complete.
  void advance(Pending& pending);
  void begin_sum(Pending& pending);
  void begin_gather(Pending& pending);
  void fold(Pending& pending);
  void drop_complete();
  Pending* find(std::uint64_t number);

  Collectives& inside_;
  Collectives& across_;
  device::Device& device_;
  bool owns_part_;
  bool replicas_read_each_other_;
  int replicas_;
  std::uint64_t next_ = 0;
  int scratches_ = 0;
  std::map<std::int64_t, std::vector<std::unique_ptr<Scratch>>> free_;  // by elements of a slice
  std::deque<Pending> pending_;                                         // the oldest first
};

}  // namespace strata::comm
