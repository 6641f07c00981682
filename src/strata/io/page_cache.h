// Whether bytes of a file are in the system's page cache, which decides how fast a buffered read of
// them is. Threads: safe everywhere. Errors: none; systems and file systems that do not report it
// are no error.
#pragma once

#include <optional>

#include "strata/base/units.h"
#include "strata/io/file.h"

namespace strata::io {

// Whether the page at `offset` is in the cache; absent if that is unknown. This does not use
// mincore(2), which calls all pages of other users' files resident.
std::optional<bool> in_page_cache(const File& file, Bytes offset);

}  // namespace strata::io
