// Collectives whose gathers need the calls of all ranks, made of some whose gathers do not
// (Traits::one_sided): for slices that lie where no peer can read them, such as on a drive. A
// gather in place (SliceMap without a buffer) copies this rank's slice to memory that peers reach,
// meets the others, and reads theirs. All else is that of the collectives underneath.
//
// For devices that do not run ahead: a gather is complete when all_gather() returns. Holds two
// slices of the largest size that was gathered in place. Threads, ownership, errors:
// collectives.h. Ranks that gather different things are named.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"

namespace strata::comm {

// `inner` is not used otherwise afterwards; one shard group.
std::shared_ptr<Collectives> make_joint_gathers(std::shared_ptr<Collectives> inner,
                                                std::shared_ptr<device::Device> device,
                                                RankNames names = {});

}  // namespace strata::comm
