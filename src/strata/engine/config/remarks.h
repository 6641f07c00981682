// Remarks on a configuration: for the user who starts with it, and for a review of it key by key
// (config_review.h). Plain values.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace strata::engine {

// An accepted key that has no effect.
struct Hint {
  std::string path;     // "zero_optimization.overlap_comm"
  std::string reason;   // why it has no effect
  bool missed = false;  // it asks for memory or output, which is missed without it

  bool operator==(const Hint&) const = default;
};

// A setting that a caller had to fill in ("auto"), or one that is missing. It is an error only for
// code that needs it: Config::require_filled_in().
struct OpenSetting {
  std::string path;     // "optimizer.params.lr"
  std::string problem;  // the message of the error
};

// The treatment of a key that the user wrote.
enum class Verdict : std::uint8_t {
  kHonoured,
  kHint,         // accepted, without effect
  kOff,          // of a feature that Strata does not have, or a section, that the values leave off
  kOpen,         // "auto", which a framework or the user has to replace
  kOwn,          // the user's, for another program
  kOldSpelling,  // of the key that the reason names
  kRefused,      // asks for a feature that Strata does not have
  kWrong,        // misspelled, or a value that it cannot have
};

struct Finding {
  std::string path;
  Verdict verdict = Verdict::kHonoured;
  std::string value;   // as JSON, shortened
  std::string reason;  // what it does, why it does nothing, or what to write instead
};

// The part that Config keeps.
struct ConfigRemarks {
  std::vector<Hint> hints;
  // The values of keys that were given, also in sections that are off: as JSON, by path.
  std::map<std::string, std::string> hint_values;
  std::vector<OpenSetting> open;  // their fields in Config hold defaults
  // Settings of this rank's output (Treatment::kShown), for the code that prints and writes: as
  // JSON, by path, defaults included; and the paths that were given.
  std::map<std::string, std::string> shown;
  std::set<std::string> shown_given;
};

struct ConfigFindings : ConfigRemarks {
  std::vector<Finding> findings;  // one a key that was read
  bool collects = false;          // an error in a key is a finding, and reading goes on
};

}  // namespace strata::engine
