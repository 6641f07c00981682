// Settings: the values of a configuration, by path, in canonical form; honoured keys that it does
// not name have their default. read_settings() walks a document along the key table and sorts its
// keys: honoured, hints, refused, still to be filled in, and the user's own. Threads: none; values.
// Errors: ConfigError with the JSON path, also when a key is given in an old and in its new
// spelling.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "strata/base/dtype.h"
#include "strata/base/error.h"
#include "strata/base/units.h"
#include "strata/engine/config/key.h"
#include "strata/engine/config/remarks.h"

namespace strata::engine {

// A key that asks for a feature that Strata does not have. Without the key a configuration is as
// good as before, but for the feature.
struct RefusedFeature : ConfigError {
  using ConfigError::ConfigError;
};

class Settings {
 public:
  void set(std::string path, nlohmann::json value) { values_[std::move(path)] = std::move(value); }
  bool has(std::string_view path) const { return values_.find(path) != values_.end(); }

  // The value of an honoured path. Null where the default is null; the typed getters below assert
  // the type that the table promises.
  const nlohmann::json& at(std::string_view path) const;
  bool flag(std::string_view path) const { return at(path).get<bool>(); }
  std::int64_t integer(std::string_view path) const { return at(path).get<std::int64_t>(); }
  double number(std::string_view path) const { return at(path).get<double>(); }
  std::string text(std::string_view path) const { return at(path).get<std::string>(); }
  template <typename T>
  std::optional<T> maybe(std::string_view path) const {
    const nlohmann::json& value = at(path);
    return value.is_null() ? std::nullopt : std::optional<T>(value.get<T>());
  }

  // The value of an honoured path as a field of a config has it: Bytes and Numel are integers of
  // the table, an enum's values are in the order of the row's choices, an optional is empty for
  // null.
  template <typename T>
  void read(std::string_view path, T& field) const {
    const nlohmann::json& value = at(path);
    if constexpr (requires {
                    typename T::value_type;
                    field.has_value();
                  }) {
      field.reset();
      if (!value.is_null()) read(path, field.emplace());
    } else if constexpr (std::is_same_v<T, DType>) {
      field = dtype_from_config(value.get<std::string>()).value();
    } else if constexpr (std::is_enum_v<T>) {
      field = static_cast<T>(choice_at(path));
    } else if constexpr (std::is_same_v<T, Bytes> || std::is_same_v<T, Numel>) {
      field = T(value.get<std::int64_t>());
    } else {
      field = value.get<T>();
    }
  }

  // The first path that no getter ever asked for: the table honours the key, but no code reads it.
  std::string first_unread() const;

  // Path to canonical text, sorted; null values are left out.
  std::map<std::string, std::string> canonical() const;

 private:
  std::size_t choice_at(std::string_view path) const;  // place among the row's choices

  std::map<std::string, nlohmann::json, std::less<>> values_;
  mutable std::set<std::string, std::less<>> read_;
};

// Walks `object`, found at `prefix` ("" for the root), along `keys` and adds to `settings` and
// `remarks`. Every honoured key of `keys` has a value in `settings` afterwards.
void read_settings(std::span<const Key> keys, const nlohmann::json& object, std::string_view prefix,
                   Settings* settings, ConfigFindings* remarks);

// To be called in the handler of `error`, which reading `value` at `path` ended with: throws it
// again, or makes a finding of it where `remarks` collects.
void record_error(const ConfigError& error, std::string_view path, const nlohmann::json& value,
                  ConfigFindings* remarks);

// The setting at `path` is "auto", and what would be written there is `wanted`, such as `example`.
OpenSetting unresolved_auto(std::string_view path, std::string_view wanted,
                            std::string_view example);

// Brings deprecated spellings of a configuration document to today's: renamed keys
// (config_aliases()) and the booleans cpu_offload, cpu_offload_param, cpu_offload_use_pin_memory,
// which became sections. Renamed keys keep their
// place in their section. `remarks` gets a finding for each old spelling.
void apply_aliases(nlohmann::ordered_json* document, ConfigFindings* remarks);

// The object that holds `path`'s last key, or null when the document has none.
nlohmann::ordered_json* holder_of(nlohmann::ordered_json* document, std::string_view path);

}  // namespace strata::engine
