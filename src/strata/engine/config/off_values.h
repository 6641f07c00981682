// Tells whether the values of a setting leave a feature off: one rule for every feature that Strata
// does not have, and for every section that lists hints. Off are
// - null, "auto", false, 0, "" and "none", an empty list, an empty object;
// - 1 of a size: of a key that ends in size, degree or stages;
// - an object that says "enabled": false or "disable": true, whatever else it holds;
// - an object whose row of the key table names switches (Key::limits), if none of those that it
//   holds is on; "enabled" counts where it holds no other;
// - an object without any of these, if all of its values are off.
// Pure functions.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "strata/engine/config/key.h"

namespace strata::engine {

// Whether `value`, of the refused feature `key`, asks for nothing.
bool leaves_off(const Key& key, const nlohmann::json& value);

// Whether an object says itself that it is off: "enabled": false, or "disable": true.
bool is_disabled(const nlohmann::json& object);

}  // namespace strata::engine
