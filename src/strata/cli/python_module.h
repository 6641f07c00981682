// Goes on as a module of the Python package: what needs torch's own reader is there. Threads: one.
// Errors: Error where there is no Python that could be run.
#pragma once

#include <string>
#include <vector>

namespace strata::cli {

// The Python that has the package: STRATA_PYTHON where that is set, else the one that was installed
// beside this program, or beside the link by which it was called, else python3 of PATH.
std::string find_python();

// Replaces this process by `python arguments...`.
[[noreturn]] void become_python(std::vector<std::string> arguments);

}  // namespace strata::cli
