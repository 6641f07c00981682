#include "strata/engine/config/value_check.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "strata/base/error.h"
#include "strata/engine/config/config_text.h"

namespace strata::engine {
namespace {

using nlohmann::json;

double parse_double(std::string_view text) {
  return std::strtod(std::string(text).c_str(), nullptr);
}

// ">= 0", "> 0", "0..3", "2 of 0..1": the part after "of" counts.
bool within(std::string_view limits, double v) {
  if (const auto of = limits.find("of "); of != std::string_view::npos)
    limits.remove_prefix(of + 3);
  if (limits.empty()) return true;
  if (const auto dots = limits.find(".."); dots != std::string_view::npos)
    return v >= parse_double(limits.substr(0, dots)) && v <= parse_double(limits.substr(dots + 2));
  if (limits.starts_with(">= ")) return v >= parse_double(limits.substr(3));
  STRATA_ASSERT(limits.starts_with("> "));
  return v > parse_double(limits.substr(2));
}

// A number within the limits; `finite`: Infinity is none.
double number_of(const Key& key, const json& value, bool finite) {
  const double v = value.is_number() ? value.get<double>() : std::nan("");
  if (std::isnan(v) || (finite && std::isinf(v)) || !within(key.limits, v))
    refuse_value(key, value);
  return v;
}

std::int64_t integer_of(const Key& key, const json& value, bool cut_fraction) {
  const double v = number_of(key, value, false);
  if (value.is_number_unsigned()) {
    const auto whole = value.get<std::uint64_t>();
    constexpr auto kTop = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    return static_cast<std::int64_t>(std::min(whole, kTop));
  }
  if (value.is_number_integer()) return value.get<std::int64_t>();
  if (!cut_fraction && v != std::floor(v))
    refuse_value(key, value, "fractions have no meaning here");
  if (!cut_fraction && !std::isfinite(v)) refuse_value(key, value);
  const std::int64_t whole = clamped(v);
  if (!within(key.limits, static_cast<double>(whole))) refuse_value(key, value);
  return whole;
}

std::int64_t bytes_of(const Key& key, const json& value) {
  if (!value.is_string()) return integer_of(key, value, true);
  const auto size = parse_size(value.get_ref<const std::string&>(), SizeText::kExact);
  if (!size || !within(key.limits, std::floor(*size))) refuse_value(key, value);
  return clamped(*size);
}

// The choice as the table spells it.
json check_choice(const Key& key, const json& value) {
  if (!value.is_string()) refuse_value(key, value);
  const std::string& given = value.get_ref<const std::string&>();
  for (const std::string_view choice : choices_in(key.limits)) {
    if (choice == given || (key.kind == Kind::kWord && lower_case(choice) == lower_case(given)))
      return choice;
  }
  refuse_value(key, value);
}

json check_numbers(const Key& key, const json& value, std::optional<std::size_t> length) {
  if (!value.is_array() || value.empty() || (length && value.size() != *length))
    refuse_value(key, value);
  json numbers = json::array();
  for (const json& item : value) {
    if (!item.is_number()) refuse_value(key, value);
    const double v = item.get<double>();
    if (!std::isfinite(v) || !within(key.limits, v)) refuse_value(key, value);
    numbers.push_back(v);
  }
  return numbers;
}

json check_strings(const Key& key, const json& value) {
  if (!value.is_array() || !std::ranges::all_of(value, &json::is_string))
    refuse_value(key, value, "write [\"...\"]");
  return value;
}

bool reads_numbers(Kind kind) {
  using enum Kind;
  constexpr std::array kNumeric{kInteger, kNumel, kBytes, kNumber, kCount, kNumbers, kPerGroup};
  return std::ranges::find(kNumeric, kind) != kNumeric.end();
}

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
  return !there || (found->is_object() && is_disabled(*found)) ? nullptr : &*found;
}

bool section_is_off(const Key& key, const json& object) {
  if (is_disabled(object)) return true;
  bool has_switch = false;
  for (const std::string_view name : choices_in(key.limits)) {
    if (name == kEnabled) continue;
    bool there = false;
    const json* value = value_at(object, name, there);
    has_switch = has_switch || there;
    if (value != nullptr && !means_off(leaf_of(name), *value)) return false;
  }
  return has_switch || (!switch_in(object, kEnabled) && all_off(object));
}

// Bytes of a unit.
std::optional<double> unit_factor(std::string_view unit, SizeText spelling) {
  const bool any_case = spelling == SizeText::kAnyCase;
  if (any_case && unit.empty()) return 1.0;
  const auto same = [any_case](char a, char b) {
    return a == b || (any_case && std::toupper(static_cast<unsigned char>(a)) ==
                                      std::toupper(static_cast<unsigned char>(b)));
  };
  if (std::ranges::equal(unit, std::string_view("B"), same)) return 1.0;
  double binary = 1024.0;
  double decimal = 1e3;
  for (const std::string_view prefix : {"K", "M", "G", "T"}) {
    if (std::ranges::equal(unit, fmt::format("{}iB", prefix), same)) return binary;
    if (std::ranges::equal(unit, fmt::format("{}B", prefix), same)) return decimal;
    binary *= 1024.0;
    decimal *= 1e3;
  }
  return std::nullopt;
}

}  // namespace

std::int64_t clamped(double v) {
  constexpr double kTop = 9223372036854775808.0;  // 2^63
  if (v >= kTop) return std::numeric_limits<std::int64_t>::max();
  if (v <= -kTop) return std::numeric_limits<std::int64_t>::min();
  return static_cast<std::int64_t>(v);
}

std::optional<double> parse_size(std::string_view text, SizeText spelling) {
  if (spelling == SizeText::kAnyCase) {
    while (text.starts_with(' ')) text.remove_prefix(1);
    while (text.ends_with(' ')) text.remove_suffix(1);
    if (text.empty() || std::isdigit(static_cast<unsigned char>(text.front())) == 0)
      return std::nullopt;
  }
  double count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  const std::optional<double> factor = unit_factor(unit, spelling);
  if (error != std::errc{} || !std::isfinite(count) || !factor) return std::nullopt;
  return count * *factor;
}

std::string shown(const json& value) {
  constexpr std::size_t kShown = 120;
  const std::string text = canonical_text(value);
  return text.size() > kShown ? text.substr(0, kShown) + "..." : text;
}

json with_numbers(const json& value) {
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    const bool padded = text.empty() || std::isspace(static_cast<unsigned char>(text.front())) ||
                        std::isspace(static_cast<unsigned char>(text.back()));
    if (padded) return value;
    json number = json::parse(text, nullptr, /*allow_exceptions=*/false);
    return number.is_number() ? number : value;
  }
  if (!value.is_array()) return value;
  json items = json::array();
  for (const json& item : value) items.push_back(with_numbers(item));
  return items;
}

std::optional<bool> flag_in(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  const json number = with_numbers(value);
  if (!number.is_number() || (number != 0 && number != 1)) return std::nullopt;
  return number == 1;
}

void refuse_value(const Key& key, const json& value, std::string_view advice) {
  throw ConfigError("{}: wanted {} ({}){}{}; found {}", key.path, wanted(key), key.meaning,
                    advice.empty() ? "" : "; ", advice, shown(value));
}

json check_value(const Key& key, const json& given) {
  const json value = reads_numbers(key.kind) ? with_numbers(given) : given;
  switch (key.kind) {
    case Kind::kFlag:
      if (const auto flag = flag_in(value)) return *flag;
      refuse_value(key, value, value.is_string() ? "write it without quotes" : "");
    case Kind::kInteger:
      return integer_of(key, value, false);
    case Kind::kNumel:
      return integer_of(key, value, true);
    case Kind::kBytes:
      return bytes_of(key, value);
    case Kind::kNumber:
      return number_of(key, value, true);
    case Kind::kCount:
      return number_of(key, value, false);
    case Kind::kText:
      if (!value.is_string()) refuse_value(key, value);
      return value;
    case Kind::kChoice:
    case Kind::kWord:
      return check_choice(key, value);
    case Kind::kStrings:
      return check_strings(key, value);
    case Kind::kTexts:
      return check_strings(key, value.is_string() ? json::array({value}) : value);
    case Kind::kNumbers:
      return check_numbers(key, value, 2);
    case Kind::kPerGroup:
      return value.is_array() ? check_numbers(key, value, std::nullopt)
                              : json(number_of(key, value, true));
    case Kind::kRules:
      if (value == "auto") return value;
      if (!value.is_array() || !std::ranges::all_of(value, &json::is_object))
        refuse_value(key, value);
      return value;
    case Kind::kParams:
      if (!value.is_object()) refuse_value(key, value);
      return value;
    case Kind::kSection:
    case Kind::kSwitch:
      break;
  }
  STRATA_ASSERT(false);
}

bool is_disabled(const json& object) {
  return switch_in(object, kEnabled) == false || switch_in(object, kDisable) == true;
}

bool leaves_off(const Key& key, const json& value) {
  if (key.kind == Kind::kSwitch && value.is_object()) return section_is_off(key, value);
  if (value.is_null() || value == "auto") return true;
  return key.fallback != "true" && means_off(leaf_of(key.path), value);
}

}  // namespace strata::engine
