// The text of a configuration: JSON text, the path of a JSON file, or JSON as urlsafe base64 (as
// launchers pass it). It is read as people and Python write it: comments (//, # and /* */), a comma
// after the last element and the tokens Infinity, -Infinity and NaN are accepted; a key given twice
// is refused. Reads the file system, nothing else. Threads: any. Errors: ConfigError with the line,
// or with the JSON path of the second key.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "strata/base/error.h"

namespace strata::engine {

// A text that is not JSON, also by the rules above; it may be in a format that a caller knows.
struct JsonSyntaxError : ConfigError {
  using ConfigError::ConfigError;
};

// Objects keep the order of their keys. `origin` names the text in messages: "ds.json".
nlohmann::ordered_json parse_json_text(std::string_view text, std::string_view origin);

// The same text in one canonical spelling: sorted keys, shortest numbers, Infinity as it came.
std::string canonical_text(const nlohmann::json& value);

// The object in a text that holds a '{', or in the file of which it is the path; else in base64.
nlohmann::ordered_json open_document(std::string_view text_or_path);

}  // namespace strata::engine
