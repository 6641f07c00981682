// What a checkpoint consists of lies in its own folder. A link out of it may lead to what somebody
// else changes or removes, or to what its reader should not see. Threads: safe everywhere. Errors:
// FormatError with both paths.
#pragma once

#include <string>

namespace strata::format {

// The file at `path`, whatever links lead to it, lies in `folder` itself. What is not there passes:
// opening it says so.
void require_inside(const std::string& folder, const std::string& path);

}  // namespace strata::format
