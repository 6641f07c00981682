// Collectives for ranks that can read each other's memory: each rank pulls what it needs from its
// peers' buffers. One implementation for threads and processes; RankMemory is what differs.
//
// all_gather copies at once: when it returns, the slices are there; its Work is complete.
// reduce_scatter only publishes; the sum is made when all ranks have published, in a later call of
// this rank: wait(), done(), the next operation of any kind. Several may be started before the
// first is waited for (64 at most; then the call itself waits). A rank that computes for long
// without a call makes peers wait that wait() for a reduction, so call done() in between. Threads,
// ownership, errors: see collectives.h. An error may come from the call that starts an operation as
// well as from its wait(). Works and buffers may outlive the Collectives; a reduction that is not
// complete by then fails.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"
#include "strata/comm/host/rank_memory.h"

namespace strata::comm {

std::unique_ptr<Collectives> make_pull_collectives(std::unique_ptr<RankMemory> memory,
                                                   const CommOptions& options);

}  // namespace strata::comm
