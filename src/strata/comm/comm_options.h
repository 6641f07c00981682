// What the collectives of one host can be told at their construction. Plain values.
#pragma once

#include <chrono>

namespace strata {
class ThreadPool;
}

namespace strata::comm {

struct CommOptions {
  // How long a rank waits for another that lives but does not come. Long, since one rank may write
  // a checkpoint while the others wait; a rank that ends is noticed at once, whatever the timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Splits large copies and sums; not owned, may be null. Used by the rank's calling thread only.
  ThreadPool* pool = nullptr;
};

}  // namespace strata::comm
