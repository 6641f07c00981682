// The number of files that a process may have open at once. Systems set a low soft limit for the
// sake of programs that use select(); any process may raise its own up to the hard limit. Threads:
// safe everywhere; the limit is the process's, and is only ever raised. Errors: none; if the hard
// limit is too low, opening a file fails and reports that.
#pragma once

#include <cstddef>

namespace strata::io {

// Raises the soft limit until `more` descriptors fit beside the open ones, or up to the hard limit.
void allow_descriptors(std::size_t more);

}  // namespace strata::io
