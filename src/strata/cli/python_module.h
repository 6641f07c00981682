// Commands that are modules of the Python package: those that need torch's own reader, and those
// that start Python programs. Threads: one. Errors: Error if there is no Python that could be run.
#pragma once

#include <string>
#include <vector>

namespace strata::cli {

// Replaces this process by `python arguments...`, with the Python that has the package.
[[noreturn]] void become_python(std::vector<std::string> arguments);

}  // namespace strata::cli
