// A configuration looked at key by key: what becomes of each, and the same configuration as it can
// be written so that every key of it has an effect, or does no harm. Where Config::parse() ends
// with the first error, this goes on. Threads: none; values. Errors: ConfigError for a text that is
// no configuration at all, as of Config::parse().
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "strata/engine/config/remarks.h"

namespace strata::engine {

struct ConfigReview {
  // Sorted by path. A key that was spelled as of old is there by both of its names.
  std::vector<Finding> findings;

  // Old spellings are today's; what is refused or off is gone; the rest is as it was, in its order.
  // Absent where that is none that can be started with: something is kWrong, or has to be chosen.
  std::optional<nlohmann::ordered_json> rewritten;

  bool accepted() const;  // Config::parse() takes it unchanged
  std::size_t count(Verdict verdict) const;
};

ConfigReview review_config(std::string_view text_or_path);

// JSON as people write it: a key a line, short lists in one, Infinity as Python reads it.
std::string pretty_text(const nlohmann::ordered_json& value);

}  // namespace strata::engine
