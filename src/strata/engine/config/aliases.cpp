#include "strata/engine/config/aliases.h"

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/config/key.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

// The object that holds `path`'s last key, or null when the document has none.
json* holder_of(json* document, std::string_view path) {
  const std::string_view parent = parent_of(path);
  if (parent.empty()) return document;
  json* holder = holder_of(document, parent);
  if (holder == nullptr) return nullptr;
  const auto found = holder->find(std::string(leaf_of(parent)));
  return found == holder->end() || !found->is_object() ? nullptr : &*found;
}

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

// "cpu_offload": true is "offload_optimizer": {"device": "cpu"}.
void apply_offload_flag(json* zero, const std::string& name, const std::string& section, bool pin) {
  const json value = take(zero, name);
  if (!flag_of("zero_optimization." + name, value)) return;
  if (zero->contains(section) && !(*zero)[section].is_null()) {
    refuse_both("zero_optimization." + name, "zero_optimization." + section);
  }
  (*zero)[section] = {{"device", "cpu"}, {"pin_memory", pin}};
}

}  // namespace

void apply_aliases(json* document) {
  for (const Alias& alias : config_aliases()) {
    json* holder = holder_of(document, alias.old_path);
    if (holder == nullptr || !holder->contains(leaf_of(alias.old_path))) continue;
    const std::string name(leaf_of(alias.path));
    json value = take(holder, std::string(leaf_of(alias.old_path)));
    if (holder->contains(name)) refuse_both(alias.old_path, alias.path);
    (*holder)[name] = std::move(value);
  }
  const auto zero = document->find("zero_optimization");
  if (zero == document->end() || !zero->is_object()) return;
  const json pin = take(&*zero, "cpu_offload_use_pin_memory");
  const bool pinned = pin.is_null() || flag_of("zero_optimization.cpu_offload_use_pin_memory", pin);
  apply_offload_flag(&*zero, "cpu_offload", "offload_optimizer", pinned);
  apply_offload_flag(&*zero, "cpu_offload_param", "offload_param", pinned);
}

}  // namespace strata::engine
