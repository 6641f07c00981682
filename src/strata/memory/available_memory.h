// How many bytes of host memory this process may still take without swapping: what the kernel
// calls available, bounded by what every control group (v2 or v1) above the process has left. File
// cache that a group could drop counts as free, as it does for the kernel.
// Threads: safe anywhere.
// Units: bytes now; other processes move it at any time.
// Errors: none; where the system does not say, the bound is absent, and the largest Bytes is
// returned when nothing is known.
#pragma once

#include <filesystem>

#include "strata/base/units.h"

namespace strata::memory {

// `root` is where proc/ and sys/ are looked for: "/" but in tests.
Bytes available_memory(const std::filesystem::path& root = "/");

}  // namespace strata::memory
