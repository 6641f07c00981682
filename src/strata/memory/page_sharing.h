// Tells whether other processes share many pages of some memory, as after a fork until one of them
// writes. If another process then reads this memory by its address, the system copies the shared
// pages first. A few shared pages do not count. Pages that were read before their first write look
// shared.
// Threads: safe anywhere. Errors: none; where the system does not say, nothing is shared.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace strata::memory {

// Looks at 256 places, spread evenly over all parts; more than 16 must be shared. Pages of files do
// not count: the system never copies them. `pages`: this process's page map; tests give another.
bool shares_pages(std::span<const std::span<const std::byte>> parts,
                  const std::filesystem::path& pages = "/proc/self/pagemap");

}  // namespace strata::memory
