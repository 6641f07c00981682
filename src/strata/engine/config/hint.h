// An accepted key of the configuration that has no effect. Plain value.
#pragma once

#include <string>

namespace strata::engine {

struct Hint {
  std::string path;    // "zero_optimization.overlap_comm"
  std::string reason;  // why it has no effect

  bool operator==(const Hint&) const = default;
};

}  // namespace strata::engine
