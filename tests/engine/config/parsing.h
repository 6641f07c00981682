// Shared by the tests of the configuration: parse, or give the message of the refusal.
#pragma once

#include <string>

#include "strata/base/error.h"
#include "strata/engine/config/config.h"

namespace strata::engine {

inline Config parsed(const std::string& json) {
  return Config::parse(json);
}

inline std::string refusal_of(const std::string& json) {
  try {
    Config::parse(json);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "accepted";
}

inline std::string reason_of(const Config& config, const std::string& path) {
  for (const Hint& hint : config.hints) {
    if (hint.path == path) return hint.reason;
  }
  return "no hint";
}

}  // namespace strata::engine
