// Runs a command line as main() does, and keeps its output. Values.
#pragma once

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "strata/cli/commands.h"

namespace strata::cli {

struct CommandRun {
  int code = -1;
  std::string out;
  std::string err;
  nlohmann::json json() const { return nlohmann::json::parse(out); }
};

inline CommandRun run(const std::vector<std::string>& arguments) {
  std::ostringstream out;
  std::ostringstream err;
  Console console{out, err};
  CommandRun result;
  result.code = run_command_line(arguments, console);
  result.out = out.str();
  result.err = err.str();
  return result;
}

}  // namespace strata::cli
