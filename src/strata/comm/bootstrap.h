// How ranks find each other before any Collectives exist: a way to exchange short texts. Above the
// torch line a c10d Store implements it; FileBootstrap serves programs and tests without torch.
// Threads: one thread a rank. Errors: CommError that names the ranks that did not come within the
// timeout.
#pragma once

#include <string>
#include <vector>

namespace strata::comm {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Collective: returns what every rank passed, by rank. The k-th call on each rank forms one
  // exchange.
  virtual std::vector<std::string> exchange(const std::string& text) = 0;
};

}  // namespace strata::comm
