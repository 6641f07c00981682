// Collectives whose ranks are threads of one process: for tests, and for programs that drive
// several devices from one process. The bytes that peers read are this process's own memory.
// Threads: a group may be used from any thread; each rank's Collectives from one thread at a time.
// Ownership: the Collectives and their buffers may outlive the group. Errors: see collectives.h.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"

namespace strata::comm {

class LocalGroup {
 public:
  // world_size >= 1.
  explicit LocalGroup(int world_size, const CommOptions& options = {});
  ~LocalGroup();
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  int world_size() const;
  // That rank's Collectives; each can be taken once. The options' pool is ignored for a world size
  // above 1, since the ranks would call it at the same time.
  std::unique_ptr<Collectives> rank(int rank);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace strata::comm
