// The options of `strata bench-io`, and what they ask for. Values. Errors: UsageError for a size
// that is none.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "strata/cli/drive_speed.h"

namespace strata::cli {

struct DriveOptions {
  std::vector<std::string> paths;
  std::string size;
  std::vector<std::string> blocks;
  std::vector<int> depths;
  std::string engine = "auto";
  bool quick = false;
};

// Gives `command` the options, which are kept in `options`.
void add_drive_options(CLI::App& command, DriveOptions& options);

DriveRequest request_of(const DriveOptions& options);

}  // namespace strata::cli
