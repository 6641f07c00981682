#include "strata/cli/python_module.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "strata/base/errno_text.h"
#include "strata/base/error.h"

namespace strata::cli {

std::string find_python() {
  if (const char* const named = std::getenv("STRATA_PYTHON"); named != nullptr) return named;
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = program.parent_path() / "python";
  return !error && std::filesystem::exists(beside, error) ? beside.string() : "python3";
}

void become_python(std::vector<std::string> arguments) {
  const std::string python = find_python();
  arguments.insert(arguments.begin(), python);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  ::execvp(python.c_str(), argv.data());
  const int code = errno;
  throw Error(
      fmt::format("cannot run '{}'; set STRATA_PYTHON to a Python that has the package strata: {}",
                  python, errno_text(code)));
}

}  // namespace strata::cli
