#include "strata/engine/config/aliases.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/config/key.h"
#include "strata/engine/config/settings.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

[[noreturn]] void refuse_both(std::string_view old_path, std::string_view path) {
  throw ConfigError(fmt::format(
      "{}: an old spelling of \"{}\", which is given too; remove the old one", old_path, path));
}

// Takes `name` out of `object`; null when it is absent.
json take(json* object, const std::string& name) {
  const auto found = object->find(name);
  if (found == object->end()) return nullptr;
  json value = std::move(*found);
  object->erase(found);
  return value;
}

bool flag_of(std::string_view path, const json& value) {
  if (value.is_null() || value == "auto") return false;
  const auto flag = flag_in(value);
  if (!flag) {
    throw ConfigError(
        fmt::format("{}: wanted true or false (an old spelling of the offload "
                    "sections); found {}",
                    path, shown(value)));
  }
  return *flag;
}

void record_old_spelling(std::string_view old_path, std::string_view path, const json& value,
                         ConfigFindings* remarks) {
  remarks->findings.push_back(
      {std::string(old_path), Verdict::kOldSpelling, shown(value), fmt::format("write {}", path)});
}

// "cpu_offload": true is "offload_optimizer": {"device": "cpu"}.
void apply_offload_flag(json* zero, const std::string& name, const std::string& section, bool pin,
                        ConfigFindings* remarks) {
  if (!zero->contains(name)) return;
  const json value = take(zero, name);
  const std::string path = "zero_optimization." + name;
  try {
    const bool on = flag_of(path, value);
    if (on && zero->contains(section) && !(*zero)[section].is_null())
      refuse_both(path, "zero_optimization." + section);
    record_old_spelling(path, fmt::format("zero_optimization.{}.device: \"cpu\"", section), value,
                        remarks);
    if (on) (*zero)[section] = {{"device", "cpu"}, {"pin_memory", pin}};
  } catch (const ConfigError& error) {
    record_error(error, path, value, remarks);
  }
}

void apply_alias(json* document, const Alias& alias, ConfigFindings* remarks) {
  json* holder = holder_of(document, alias.old_path);
  if (holder == nullptr || !holder->contains(leaf_of(alias.old_path))) return;
  json value = take(holder, std::string(leaf_of(alias.old_path)));
  try {
    json* target = holder_of(document, alias.path);
    STRATA_ASSERT(target != nullptr);
    const std::string name(leaf_of(alias.path));
    if (target->contains(name)) refuse_both(alias.old_path, alias.path);
    record_old_spelling(alias.old_path, alias.path, value, remarks);
    (*target)[name] = std::move(value);
  } catch (const ConfigError& error) {
    record_error(error, alias.old_path, value, remarks);
  }
}

// "zero_optimization": true is stage 1.
void apply_zero_flag(json* document, ConfigFindings* remarks) {
  constexpr const char* kZero = "zero_optimization";
  const auto found = document->find(kZero);
  if (found == document->end() || !found->is_boolean()) return;
  const int stage = found->get<bool>() ? 1 : 0;
  record_old_spelling(kZero, fmt::format("zero_optimization.stage: {}", stage), *found, remarks);
  *found = {{"stage", stage}};
}

void apply_offload_flags(json* zero, ConfigFindings* remarks) {
  constexpr std::string_view kPin = "zero_optimization.cpu_offload_use_pin_memory";
  const json pin = take(zero, std::string(leaf_of(kPin)));
  bool pinned = true;
  try {
    pinned = pin.is_null() || flag_of(kPin, pin);
    if (!pin.is_null())
      record_old_spelling(kPin, "pin_memory in the offload sections", pin, remarks);
  } catch (const ConfigError& error) {
    record_error(error, kPin, pin, remarks);
  }
  apply_offload_flag(zero, "cpu_offload", "offload_optimizer", pinned, remarks);
  apply_offload_flag(zero, "cpu_offload_param", "offload_param", pinned, remarks);
}

}  // namespace

json* holder_of(json* document, std::string_view path) {
  const std::string_view parent = parent_of(path);
  if (parent.empty()) return document;
  json* holder = holder_of(document, parent);
  if (holder == nullptr) return nullptr;
  const auto found = holder->find(std::string(leaf_of(parent)));
  return found == holder->end() || !found->is_object() ? nullptr : &*found;
}

void apply_aliases(json* document, ConfigFindings* remarks) {
  apply_zero_flag(document, remarks);
  for (const Alias& alias : config_aliases()) apply_alias(document, alias, remarks);
  const auto zero = document->find("zero_optimization");
  if (zero != document->end() && zero->is_object()) apply_offload_flags(&*zero, remarks);
}

}  // namespace strata::engine
