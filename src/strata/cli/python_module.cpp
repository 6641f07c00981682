#include "strata/cli/python_module.h"

#include <fmt/core.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "strata/base/error.h"

namespace strata::cli {
namespace {

// STRATA_PYTHON if it is set, else the Python that was installed beside this program, or beside the
// link by which it was called, else python3 of PATH.
std::string find_python() {
  if (const char* const named = std::getenv("STRATA_PYTHON"); named != nullptr) return named;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  // The path by which it was called: perhaps a link in a virtual environment.
  const auto* const called = reinterpret_cast<const char*>(::getauxval(AT_EXECFN));
  for (const std::filesystem::path& path :
       {program, std::filesystem::path(called == nullptr ? "" : called)}) {
    const std::filesystem::path beside = path.parent_path() / "python";
    if (path.has_parent_path() && std::filesystem::exists(beside, error)) return beside.string();
  }
  return "python3";
}

}  // namespace

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
