// Whether other processes have pages of some memory as well, as after a fork until somebody writes:
// who then lets another process read it by its address has the system make a copy of it first.
// Threads: safe anywhere. Errors: none; where the system does not say, nothing is shared.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace strata::memory {

// Looks at some pages of all parts together, evenly. Pages of files do not count: nobody copies
// them. `pages`: of this process, but in tests.
bool shares_pages(std::span<const std::span<const std::byte>> parts,
                  const std::filesystem::path& pages = "/proc/self/pagemap");

}  // namespace strata::memory
