// All files of a checkpoint lie in its own folder. A link out of it may lead to a file that another
// program changes or removes, or that its reader should not see. Threads: safe everywhere. Errors:
// FormatError with both paths.
#pragma once

#include <string>

namespace strata::format {

// Checks that the file at `path`, after all links, lies in `folder` itself. A missing file passes:
// opening it fails.
void require_inside(const std::string& folder, const std::string& path);

}  // namespace strata::format
