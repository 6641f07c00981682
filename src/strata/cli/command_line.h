// The program `strata`: reads a command line, runs the one command that it names, and writes its
// report to `out`, errors and progress to `err`. Threads: one, beside those of the commands.
// Errors: none leave; they are messages and exit codes.
#pragma once

#include <string>
#include <vector>

#include "strata/cli/console.h"

namespace strata::cli {

enum ExitCode : int {
  kDone = 0,
  kFoundWrong = 1,  // damaged, different, does not fit; or the machine failed
  kUsage = 2,       // the command line, or what it names, cannot be meant
};

// `arguments` without the program's name.
int run_command_line(const std::vector<std::string>& arguments, Console& console);

}  // namespace strata::cli
