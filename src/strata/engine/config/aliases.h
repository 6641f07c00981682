// Brings deprecated spellings of a configuration document to today's: renamed keys
// (config_aliases()) and the booleans cpu_offload, cpu_offload_param, cpu_offload_use_pin_memory,
// which became sections. Pure. Errors: ConfigError when an old and its new key are both given.
#pragma once

#include <nlohmann/json.hpp>

namespace strata::engine {

void apply_aliases(nlohmann::json* document);

}  // namespace strata::engine
