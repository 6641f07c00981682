// Collectives of one group of ranks of which one carries gathers and another one reductions: copy
// engines and NCCL, say, whichever is faster at each.
//
// At most one of the two is one-sided. It allocates the memory, since it reads no other; the other
// one carries any memory, and goes on by itself while this rank waits for a peer's buffer. A
// barrier is one of both. all_reduce, after which slices may change, goes through the gathers'
// collectives. An exchange on the device goes through the one that has it, and waits for gathers of
// the other. traits.h says what the pair promises.
//
// Both compare what ranks do over one control plane (agreement.h), so a rank that gathers while
// another reduces gets an error that names both, without one more meeting of the ranks.
// Threads, ownership: collectives.h. Errors: collectives.h; a failure of either part ends both.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"

namespace strata::comm {

// Both are of the same ranks and share a control plane; the caller uses neither afterwards. The
// world must be one shard group.
std::unique_ptr<Collectives> make_split_collectives(std::shared_ptr<Collectives> gathers,
                                                    std::shared_ptr<Collectives> reductions);

}  // namespace strata::comm
