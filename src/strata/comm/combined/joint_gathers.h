// Collectives whose gathers need the calls of all ranks, made from collectives whose gathers do not
// (Traits::one_sided): for slices in memory that no peer can read, or on a drive. A gather in place
// (SliceMap without a buffer) copies this rank's slice to memory that peers reach, waits for the
// others, and reads their slices. All other operations are those of the collectives underneath.
//
// For devices that do not run ahead: a gather is complete when all_gather() returns. Holds two
// slices of the largest size that was gathered in place. Threads, ownership, errors: collectives.h.
// If ranks gather different things, the error names them.
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
