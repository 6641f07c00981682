// Options of the collectives of one host. Plain values.
#pragma once

#include <chrono>

namespace strata {
class ThreadPool;
}

namespace strata::comm {

// The names of ranks in errors: their numbers in the world, of which these may be some.
struct RankNames {
  int first = 0;
  int step = 1;
  int of(int rank) const { return first + step * rank; }
};

struct CommOptions {
  // How long a rank waits for another that lives but does not come. Long, since one rank may write
  // a checkpoint while the others wait; a rank that ends is noticed at once, whatever the timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Splits large copies and sums; not owned, may be null. Used by the rank's calling thread only.
  ThreadPool* pool = nullptr;
  RankNames names = {};
};

}  // namespace strata::comm
