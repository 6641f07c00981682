// How many files a process may have open at once. Systems set a low soft limit for the sake of
// programs that use select(); any process may raise its own up to the hard one. Threads: safe
// everywhere; the limit is the process's, and is only ever raised. Errors: none; where the hard
// limit is too low, opening fails and says so.
#pragma once

#include <cstddef>

namespace strata::io {

// Raises the soft limit as far as `more` descriptors beside those that are open need, or the hard
// limit allows.
void allow_descriptors(std::size_t more);

}  // namespace strata::io
