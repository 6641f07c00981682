// A review of a configuration, key by key: the effect of each key, and a rewritten configuration in
// which every key has an effect, or does no harm. Threads: none; values. Errors: ConfigError for a
// text that is no configuration at all; the first error in a key does not end the review.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/engine/config/remarks.h"

namespace strata::engine {

struct ConfigReview {
  // Sorted by path. A key with an old spelling is listed under both names.
  std::vector<Finding> findings;

  // The configuration with today's spellings, without keys that are refused or off; the other keys
  // are unchanged, in their order. Absent if no run can start with it: a key is kWrong, or a value
  // has to be chosen.
  std::optional<nlohmann::ordered_json> rewritten;

  bool accepted() const;  // Config::parse() takes it unchanged
  std::size_t count(Verdict verdict) const;
};

ConfigReview review_config(std::string_view text_or_path);

// JSON as people write it: a key a line, short lists in one, Infinity as Python reads it.
std::string pretty_text(const nlohmann::ordered_json& value);

}  // namespace strata::engine
