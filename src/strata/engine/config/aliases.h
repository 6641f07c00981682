// Brings deprecated spellings of a configuration document to today's: renamed keys
// (config_aliases()) and the booleans cpu_offload, cpu_offload_param, cpu_offload_use_pin_memory,
// which became sections. Pure. Errors: ConfigError when an old and its new key are both given.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "strata/engine/config/remarks.h"

namespace strata::engine {

// `remarks` gets a finding for each old spelling.
void apply_aliases(nlohmann::json* document, ConfigFindings* remarks);

// The object that holds `path`'s last key, or null when the document has none.
nlohmann::json* holder_of(nlohmann::json* document, std::string_view path);

}  // namespace strata::engine
