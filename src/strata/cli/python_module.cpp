#include "strata/cli/python_module.h"

#include <fmt/format.h>
#include <sys/auxv.h>
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
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  // As it was called: a link to a program that lies elsewhere, in a virtual environment say.
  const auto* const called = reinterpret_cast<const char*>(::getauxval(AT_EXECFN));
  for (const std::filesystem::path& path :
       {program, std::filesystem::path(called == nullptr ? "" : called)}) {
    const std::filesystem::path beside = path.parent_path() / "python";
    if (path.has_parent_path() && std::filesystem::exists(beside, error)) return beside.string();
  }
  return "python3";
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
