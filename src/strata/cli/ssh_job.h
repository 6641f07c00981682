// Several commands that are one job: started together, and ended together. The processes are ssh's;
// what runs on the hosts is torchrun. Threads: one. Errors: Error where a program cannot be
// started; then, and when one ends with another code than 0, or a signal comes, the others are
// ended too.
#pragma once

#include <string>
#include <vector>

namespace strata::cli {

// Runs `program` once for each of `commands`, its arguments, and waits for all. The exit code of
// the first that failed, 0 if none did.
int run_together(const std::string& program, const std::vector<std::vector<std::string>>& commands);

}  // namespace strata::cli
