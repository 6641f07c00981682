// Collectives for ranks that can read each other's memory: each rank pulls what it needs from its
// peers' buffers. One implementation for threads and processes; RankMemory is what differs.
//
// all_gather copies at once: when it returns, the slices are there. reduce_scatter only publishes;
// a later call of this rank (wait(), done(), the next operation) makes the sum when all ranks have
// published. At most 64 may be under way; then the call itself waits. Threads, ownership, errors:
// collectives.h. Works and buffers may outlive the Collectives; a reduction that is not complete by
// then fails.
#pragma once

#include <memory>

#include "strata/base/interface.h"
#include "strata/comm/collectives.h"
#include "strata/comm/host/rank_link.h"

namespace strata::comm {

std::unique_ptr<Collectives> make_pull_collectives(std::unique_ptr<RankMemory> memory,
                                                   const CommOptions& options);

// Collectives whose ranks are threads of one process: for tests, and for programs that drive
// several devices from one process. The bytes that peers read are this process's own memory.
// Threads: a group may be used from any thread; each rank's Collectives from one thread at a time.
// Ownership: the Collectives and their buffers may outlive the group. Errors: see collectives.h.
class LocalGroup : NonCopyable {
 public:
  // world_size >= 1.
  explicit LocalGroup(int world_size, const CommOptions& options = {});
  ~LocalGroup();

  int world_size() const;
  // That rank's Collectives; each can be taken once. The options' pool is ignored for a world size
  // above 1, since the ranks would call it at the same time.
  std::unique_ptr<Collectives> rank(int rank);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

// Collectives whose ranks are processes of one host, and which pull from each other's shared
// memory. Nothing of it has a name in a file system, so nothing is left behind, however a process
// ends. Needs: Linux >= 5.3, one user and one PID namespace for all ranks (/proc/<pid>/fd of the
// others must be readable). Where that is not so, every rank gets a CommError that says which rank
// cannot reach which and why. Threads, ownership, errors: see collectives.h. A rank that ends is
// noticed within a second.

// Collective: every rank of the bootstrap calls it; takes two exchanges.
std::unique_ptr<Collectives> make_shm_collectives(Bootstrap& bootstrap,
                                                  const CommOptions& options = {});

}  // namespace strata::comm
