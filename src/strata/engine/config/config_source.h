// Where a configuration comes from: JSON text, the path of a JSON file, or JSON as urlsafe base64
// (as launchers pass it). Reads the file system, nothing else. Errors: ConfigError.
#pragma once

#include <string>
#include <string_view>

namespace strata::engine {

struct ConfigSource {
  std::string text;    // JSON
  std::string origin;  // "/data/ds.json", "the configuration": for messages
};

// A text that holds a '{' is JSON; another one is a path when such a file exists, else base64.
ConfigSource open_config_source(std::string_view text_or_path);

}  // namespace strata::engine
