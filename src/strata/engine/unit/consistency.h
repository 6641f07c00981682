// Finds out whether all ranks brought the same thing, before anything depends on it.
#pragma once

#include <string>

#include "strata/comm/collectives.h"

namespace strata::engine {

// Collective. Compares every rank's `text` with rank 0's, line by line. If they differ, throws
// ConfigError on every rank, with the first differing line, rank 0's text there, that of the first
// other rank, and the ranks that differ. `what` names the thing ("model", "configuration").
void agree_on_text(comm::Collectives& collectives, const std::string& what,
                   const std::string& text);

}  // namespace strata::engine
