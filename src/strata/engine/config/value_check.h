// Checks one value of the configuration against its row of the key table, and brings it into one
// form: whole numbers as integers, sizes in elements or bytes as integers, numbers as floating
// point, flags as booleans, choices as the table spells them. Pure functions. Errors: ConfigError
// "PATH: wanted WHAT (meaning); found VALUE". Tells, too, whether values leave a feature off.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>

#include "strata/engine/config/key.h"

namespace strata::engine {

nlohmann::json check_value(const Key& key, const nlohmann::json& value);

// Throws the ConfigError of a value that `key` cannot have.
[[noreturn]] void refuse_value(const Key& key, const nlohmann::json& value,
                               std::string_view advice = {});

// A text that is exactly a number of JSON ("3", "-0.01", "1e-5") becomes that number, also within
// lists; any other value is returned unchanged.
nlohmann::json with_numbers(const nlohmann::json& value);

// true, false; 1 and 0, also as text. nullopt for any other value.
std::optional<bool> flag_in(const nlohmann::json& value);

// Bytes of a size with its unit: "5GB", "1.5 MiB"; finite. nullopt for any other text. kAnyCase:
// the unit in any case, or none, which means bytes; spaces around.
enum class SizeText { kExact, kAnyCase };
std::optional<double> parse_size(std::string_view text, SizeText spelling);

// Towards zero; what no int64 holds becomes the largest or smallest.
std::int64_t clamped(double v);

// A value as messages show it: its JSON, shortened.
std::string shown(const nlohmann::json& value);

// Whether `value`, of the refused feature `key`, asks for nothing: one rule for every feature that
// Strata does not have, and for every section that lists hints. Off are
// - null, "auto", false, 0, "" and "none", an empty list, an empty object;
// - 1 of a size: of a key that ends in size, degree or stages;
// - an object that says "enabled": false or "disable": true, whatever else it holds;
// - an object whose row of the key table names switches (Key::limits), if none of those that it
//   holds is on; "enabled" counts where it holds no other;
// - an object without any of these, if all of its values are off.
bool leaves_off(const Key& key, const nlohmann::json& value);

// Whether an object says itself that it is off: "enabled": false, or "disable": true.
bool is_disabled(const nlohmann::json& object);

}  // namespace strata::engine
