// Collectives of one group of ranks of which one carries gathers and another one reductions: copy
// engines and NCCL, say, whichever is faster at each.
//
// At most one of the two is one-sided. Memory comes from that one, since it reads no other; what is
// not one-sided carries any memory, its operations being collectives, and goes on by itself while
// this rank waits for a peer's buffer. Synchronisation is what both
// need: a barrier is one of both, and all_reduce, after which slices may change, is that of the
// gathers. An exchange on the device goes through the one that has it, and waits for gathers of the
// other. What reductions promise, their order, their width and the stream that they like, is the
// promise of the reductions'.
//
// Both compare what ranks do over one control plane (agreement.h), so that a rank that gathers
// while another reduces is an error that names both, without another meeting of the ranks.
// Threads, ownership: collectives.h. Errors: collectives.h; a failure of either part ends both.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"

namespace strata::comm {

// Of the same ranks, sharing a control plane; neither is used otherwise afterwards. A world that is
// one shard group.
std::unique_ptr<Collectives> make_split_collectives(std::shared_ptr<Collectives> gathers,
                                                    std::shared_ptr<Collectives> reductions);

}  // namespace strata::comm
