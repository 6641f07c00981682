// Collectives whose ranks are processes of one host, and which pull from each other's shared
// memory. Nothing of it has a name in a file system, so nothing is left behind, however a process
// ends. Needs: Linux >= 5.3, one user and one PID namespace for all ranks (/proc/<pid>/fd of the
// others must be readable). Where that is not so, every rank gets a CommError that says which rank
// cannot reach which and why. Threads, ownership, errors: see collectives.h. A rank that ends is
// noticed within a second.
#pragma once

#include <memory>

#include "strata/comm/bootstrap.h"
#include "strata/comm/collectives.h"
#include "strata/comm/comm_options.h"

namespace strata::comm {

// Collective: every rank of the bootstrap calls it; takes two exchanges.
std::unique_ptr<Collectives> make_shm_collectives(Bootstrap& bootstrap,
                                                  const CommOptions& options = {});

}  // namespace strata::comm
