// Checks one value of the configuration against its row of the key table, and brings it into one
// form: whole numbers as integers, sizes in elements or bytes as integers, numbers as floating
// point. Pure functions. Errors: ConfigError "PATH: wanted WHAT (meaning); found VALUE".
#pragma once

#include <nlohmann/json.hpp>

#include "strata/engine/config/key.h"

namespace strata::engine {

nlohmann::json check_value(const Key& key, const nlohmann::json& value);

// Whether a kSwitch object asks for its feature: one of its switches is set, or it has content but
// none.
bool is_switched_on(const Key& key, const nlohmann::json& value);

// A value as messages show it: its JSON, shortened.
std::string shown(const nlohmann::json& value);

}  // namespace strata::engine
