// What reading a configuration leaves to be said. Plain values.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace strata::engine {

// An accepted key that has no effect.
struct Hint {
  std::string path;    // "zero_optimization.overlap_comm"
  std::string reason;  // why it has no effect

  bool operator==(const Hint&) const = default;
};

// A setting that a caller had to fill in ("auto"), or one that is missing. It is an error only for
// who needs it: Config::require_filled_in().
struct OpenSetting {
  std::string path;     // "optimizer.params.lr"
  std::string problem;  // the message of the error
};

struct Remarks {
  std::vector<Hint> hints;
  std::map<std::string, std::string>
      hint_values;  // as JSON, by path; also of sections that are off
  std::vector<OpenSetting> open;
};

}  // namespace strata::engine
