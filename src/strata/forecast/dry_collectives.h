// One rank's collectives without the others. Operations move no bytes, and count as under way until
// the caller waits for them, so the engine on them holds as much as it ever may. Texts and small
// values come back as if every rank had sent the same. Threads: one thread at a time. Ownership:
// shares the device. Errors: none.
#pragma once

#include <memory>

#include "strata/comm/collectives.h"

namespace strata::forecast {

// Rank 0 of collectives with these traits.
std::unique_ptr<comm::Collectives> make_dry_collectives(const comm::Traits& traits,
                                                        std::shared_ptr<device::Device> device);

}  // namespace strata::forecast
