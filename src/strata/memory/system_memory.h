// Facts about memory that the system reports: the bytes that this process may still take, and
// whether other processes share pages with it. Threads: safe anywhere. Errors: none; what the
// system does not report is taken as unbounded, or as not shared.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include "strata/base/units.h"

namespace strata::memory {

// The bytes of host memory that this process may still take without swapping: the kernel's
// available memory, bounded by the rest that every control group (v2 or v1) above the process has.
// File cache that a group could drop counts as free. Other processes change the result at any time.
// `root`: the folder that holds proc/ and sys/; "/" except in tests.
Bytes available_memory(const std::filesystem::path& root = "/");

// Tells whether other processes share many pages of some memory, as after a fork until one of them
// writes. If another process then reads this memory by its address, the system copies the shared
// pages first. Looks at 256 places, spread evenly over all parts; more than 16 must be shared.
// Pages of files do not count: the system never copies them. Pages that were read before their
// first write look shared. `pages`: this process's page map; tests give another.
bool shares_pages(std::span<const std::span<const std::byte>> parts,
                  const std::filesystem::path& pages = "/proc/self/pagemap");

}  // namespace strata::memory
