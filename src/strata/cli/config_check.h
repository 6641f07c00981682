// `strata check`: the treatment of each key of a DeepSpeed configuration, and the same
// configuration rewritten so that initialize() accepts it. Threads: one. Errors: ConfigError for a
// file that is no configuration; IoError if the rewritten one cannot be written.
#pragma once

#include <string>

#include "strata/cli/console.h"

namespace strata::cli {

struct CheckRequest {
  std::string config;  // path
  std::string fix;     // where to write the rewritten one; empty: nowhere
};

Report check_config(const CheckRequest& request);

}  // namespace strata::cli
