// The bytes of host memory that this process may still take without swapping: the kernel's
// available memory, bounded by the rest that every control group (v2 or v1) above the process has.
// File cache that a group could drop counts as free, as it does for the kernel.
// Threads: safe anywhere. Units: bytes now; other processes change it at any time. Errors: none; if
// the system does not report a bound, that bound is absent, and without any bound the result is the
// largest Bytes.
// returned when nothing is known.
#pragma once

#include <filesystem>

#include "strata/base/units.h"

namespace strata::memory {

// `root`: the folder that holds proc/ and sys/; "/" except in tests.
Bytes available_memory(const std::filesystem::path& root = "/");

}  // namespace strata::memory
