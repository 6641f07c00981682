// The program `strata`. Everything that it does is in commands.h.
#include <unistd.h>

#include <iostream>
#include <limits>

#include "strata/cli/commands.h"
#include "strata/io/file.h"

int main(int argc, char** argv) {
  std::ios::sync_with_stdio(false);
  // A checkpoint has two files a rank, and all are open at once.
  strata::io::allow_descriptors(std::numeric_limits<std::int32_t>::max());
  strata::cli::Console console{std::cout, std::cerr, ::isatty(STDERR_FILENO) == 1};
  return strata::cli::run_command_line({argv + 1, argv + argc}, console);
}
