// Whether other processes have many pages of some memory as well, as after a fork until somebody
// writes: who then lets another process read it by its address has the system make a copy of those
// pages first. A few do not count; pages that were read before anybody wrote to them look shared.
// Threads: safe anywhere. Errors: none; where the system does not say, nothing is shared.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace strata::memory {

// Looks at 256 places of all parts together, evenly; more than 16 must be shared. Pages of files do
// not count: nobody copies them. `pages`: of this process, but in tests.
bool shares_pages(std::span<const std::span<const std::byte>> parts,
                  const std::filesystem::path& pages = "/proc/self/pagemap");

}  // namespace strata::memory
