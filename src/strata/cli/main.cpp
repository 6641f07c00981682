// The program `strata`. Everything that it does is in command_line.h.
#include <sys/resource.h>
#include <unistd.h>

#include <iostream>

#include "strata/cli/command_line.h"

namespace {

// A checkpoint has two files a rank, and all are open at once.
void raise_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int argc, char** argv) {
  std::ios::sync_with_stdio(false);
  raise_file_limit();
  strata::cli::Console console{std::cout, std::cerr, ::isatty(STDERR_FILENO) == 1};
  return strata::cli::run_command_line({argv + 1, argv + argc}, console);
}
