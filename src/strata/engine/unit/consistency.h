// Finds out whether all ranks brought the same thing, before anything depends on it.
#pragma once

#include <string>

#include "strata/comm/collectives.h"

namespace strata::engine {

// Collective. Compares everybody's `text` with rank 0's, line by line. Returns on equality; else
// throws ConfigError on every rank: the first differing line, what rank 0 has there, what the first
// other rank has, and which ranks differ. `what` names the thing ("model", "configuration").
void require_same_text(comm::Collectives& collectives, const std::string& what,
                       const std::string& text);

}  // namespace strata::engine
