#include "strata/engine/config/off_values.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "strata/engine/config/nearest.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

constexpr std::string_view kEnabled = "enabled";
constexpr std::string_view kDisable = "disable";

bool is_size(std::string_view name) {
  const std::string small = lower_case(name);
  return std::ranges::any_of(std::array{"size", "degree", "stages"},
                             [&](const char* end) { return small.ends_with(end); });
}

// The value of the switch `name` of `object`; absent if it is missing, null or "auto".
std::optional<bool> switch_in(const json& object, std::string_view name) {
  const auto found = object.find(std::string(name));
  if (found == object.end() || found->is_null() || *found == "auto") return std::nullopt;
  return flag_in(*found).value_or(true);
}

bool means_off(std::string_view name, const json& value);

bool all_off(const json& object) {
  for (const auto& [name, value] : object.items()) {
    if (name != kEnabled && name != kDisable && !means_off(name, value)) return false;
  }
  return true;
}

bool means_off(std::string_view name, const json& value) {
  if (value.is_null() || value == "auto" || value == "none") return true;
  if (value.is_object())
    return is_disabled(value) || (!switch_in(value, kEnabled) && all_off(value));
  if (value.is_array() || value == "") return value.empty() || value == "";
  const json number = with_numbers(value);
  if (number.is_number()) return number == 0 || (number == 1 && is_size(name));
  return flag_in(value) == false;
}

// The value at "a.b" within `object`; null where it is not there, or where it lies in an object
// that is off. `there`: whether it is.
const json* value_at(const json& object, std::string_view path, bool& there) {
  const std::string_view parent = parent_of(path);
  const json* holder = parent.empty() ? &object : value_at(object, parent, there);
  if (holder == nullptr || !holder->is_object()) return nullptr;
  const auto found = holder->find(std::string(leaf_of(path)));
  there = found != holder->end();
  if (!there || (found->is_object() && is_disabled(*found))) return nullptr;
  return &*found;
}

std::vector<std::string_view> switches_of(const Key& key) {
  std::vector<std::string_view> names;
  std::string_view rest = key.limits;
  while (!rest.empty()) {
    const auto bar = std::min(rest.find('|'), rest.size());
    names.push_back(rest.substr(0, bar));
    rest.remove_prefix(std::min(bar + 1, rest.size()));
  }
  return names;
}

bool section_is_off(const Key& key, const json& object) {
  if (is_disabled(object)) return true;
  bool has_switch = false;
  for (const std::string_view name : switches_of(key)) {
    if (name == kEnabled) continue;
    bool there = false;
    const json* value = value_at(object, name, there);
    has_switch = has_switch || there;
    if (value != nullptr && !means_off(leaf_of(name), *value)) return false;
  }
  return has_switch || (!switch_in(object, kEnabled) && all_off(object));
}

}  // namespace

bool is_disabled(const json& object) {
  return switch_in(object, kEnabled) == false || switch_in(object, kDisable) == true;
}

bool leaves_off(const Key& key, const json& value) {
  if (key.kind == Kind::kSwitch && value.is_object()) return section_is_off(key, value);
  if (value.is_null() || value == "auto") return true;
  return key.fallback != "true" && means_off(leaf_of(key.path), value);
}

}  // namespace strata::engine
