// `strata check`: the treatment of each key of a DeepSpeed configuration, and the same
// configuration rewritten so that initialize() accepts it. Threads: one. Errors: ConfigError for a
// file that is no configuration; IoError if the rewritten one cannot be written.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "strata/engine/config/config_review.h"

namespace strata::cli {

struct CheckRequest {
  std::string config;  // path
  std::string fix;     // where to write the rewritten one; empty: nowhere
};

struct ConfigCheck {
  CheckRequest request;
  engine::ConfigReview review;
  bool written = false;
};

ConfigCheck check_config(const CheckRequest& request);

std::string text_of(const ConfigCheck& check);
nlohmann::json json_of(const ConfigCheck& check);

}  // namespace strata::cli
