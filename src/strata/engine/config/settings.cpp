#include "strata/engine/config/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "strata/base/error.h"
#include "strata/engine/config/json_text.h"
#include "strata/engine/config/lookalike.h"
#include "strata/engine/config/nearest.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

// Top-level keys that callers fill in, so "auto" there means: not given.
constexpr std::array<std::string_view, 4> kFilledByCallers{
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "communication_data_type"};

// Training would go wrong with a default where callers fill in what the user chose.
bool must_be_filled_in(const Key& key) {
  for (const std::string_view path :
       {"gradient_clipping", "zero_optimization.stage", "scheduler.type"}) {
    if (key.path == path) return true;
  }
  const std::string_view section = parent_of(key.path);
  const bool number = key.kind == Kind::kNumber || key.kind == Kind::kNumbers ||
                      key.kind == Kind::kInteger || key.kind == Kind::kPerGroup;
  return (section == "optimizer.params" || section == "scheduler.params") && number;
}

// A value that a reader can copy, where the table has no default.
std::string example_of(const Key& key) {
  if (key.fallback != "null") return std::string(key.fallback);
  return key.kind == Kind::kInteger ? "1000" : "0.001";
}

class Reader {
 public:
  Reader(std::span<const Key> keys, Settings* settings, Remarks* remarks)
      : keys_(keys), settings_(settings), remarks_(remarks) {}

  void read(const json& object, std::string_view prefix, bool quiet) {
    for (const auto& [name, value] : object.items()) {
      if (prefix.empty() && name.find('.') != std::string::npos) {
        remarks_->hints.push_back({name,
                                   "a key with a dot names nothing; nest it: {\"section\": "
                                   "{\"key\": value}}"});
        continue;
      }
      const std::string path = join_path(prefix, name);
      const Key* key = find_key(keys_, path);
      if (key == nullptr) {
        if (!prefix.empty()) refuse_unknown(path, nearest_to(path, prefix), value);
        take_unknown(name, value);
        continue;
      }
      if (!is_given(*key, value, prefix)) continue;
      if (key->kind == Kind::kSection) {
        if (!value.is_object()) refuse_type(*key, value);
        read(value, path, quiet || is_switched_off(*key, value));
      } else {
        take(*key, value, quiet);
      }
    }
  }

  void fill_defaults() {
    for (const Key& key : keys_) {
      if (key.treatment != Treatment::kHonoured || key.kind == Kind::kSection) continue;
      if (!settings_->has(key.path))
        settings_->set(std::string(key.path), json::parse(key.fallback));
    }
  }

 private:
  bool is_given(const Key& key, const json& value, std::string_view prefix) {
    if (value.is_null()) return false;
    if (value != "auto" || key.kind == Kind::kRules) return true;
    if (must_be_filled_in(key)) {
      remarks_->open.push_back(unresolved_auto(
          key.path, fmt::format("{} ({})", wanted(key), key.meaning), example_of(key)));
      return false;
    }
    if (!prefix.empty()) return false;
    const bool filled = std::ranges::find(kFilledByCallers, key.path) != kFilledByCallers.end();
    if (!filled && key.kind != Kind::kText) {
      throw ConfigError(
          fmt::format("{}: \"auto\" is filled in by the caller of other keys, not of this one; "
                      "write {} ({}) or "
                      "remove the key; found \"auto\"",
                      key.path, wanted(key), key.meaning));
    }
    return false;
  }

  // A section of hints that is disabled asks for nothing, so its keys need not be listed.
  bool is_switched_off(const Key& section, const json& object) const {
    const std::string path = join_path(section.path, "enabled");
    const Key* key = find_key(keys_, path);
    if (key == nullptr || key->treatment != Treatment::kHint) return false;
    const auto found = object.find("enabled");
    return found == object.end() ? key->fallback != "true" : flag_in(*found) == false;
  }

  void take(const Key& key, const json& value, bool quiet) {
    if (key.kind == Kind::kSwitch) {
      if (is_switched_on(key, value)) refuse_feature(key, value);
      if (value.is_object() && value.empty()) {
        remarks_->hints.push_back({std::string(key.path),
                                   fmt::format("an empty section counts as off: {}", key.meaning)});
      }
      return;
    }
    json checked = check_value(key, value);
    if (key.treatment == Treatment::kHonoured) {
      settings_->set(std::string(key.path), std::move(checked));
    } else if (key.treatment == Treatment::kHint) {
      remarks_->hint_values.emplace(key.path, canonical_text(checked));
      if (!quiet) remarks_->hints.push_back({std::string(key.path), std::string(key.note)});
    } else if (checked != json::parse(key.fallback)) {
      refuse_feature(key, value);
    }
  }

  [[noreturn]] static void refuse_feature(const Key& key, const json& value) {
    throw ConfigError(fmt::format("{}: not supported ({}); {}; found {}", key.path, key.meaning,
                                  key.note, shown(value)));
  }

  [[noreturn]] static void refuse_type(const Key& key, const json& value) {
    throw ConfigError(fmt::format("{}: wanted {} ({}); found {}", key.path, wanted(key),
                                  key.meaning, shown(value)));
  }

  // A top-level key of no table: a misspelled one, or the user's own, for another program.
  void take_unknown(const std::string& name, const json& value) {
    const std::string near = lookalike_of(name, value);
    if (!near.empty()) refuse_unknown(name, near, value);
    remarks_->hints.push_back(
        {name, "no key of DeepSpeed or Strata has a name like it, so it is taken for your own"});
  }

  std::string nearest_to(const std::string& path, std::string_view prefix) const {
    const std::string_view leaf = leaf_of(path);
    std::string_view meant;
    std::vector<std::string_view> siblings;
    for (const Key& key : keys_) {
      if (leaf_of(key.path) == leaf) meant = key.path;  // right key, wrong section
      if (parent_of(key.path) == prefix) siblings.push_back(leaf_of(key.path));
    }
    return meant.empty() ? join_path(prefix, nearest_of(leaf, siblings)) : std::string(meant);
  }

  [[noreturn]] static void refuse_unknown(const std::string& path, const std::string& near,
                                          const json& value) {
    throw ConfigError(
        fmt::format("{}: unknown key; the nearest known one is \"{}\"; write that or "
                    "remove the key; found {}",
                    path, near, shown(value)));
  }

  std::span<const Key> keys_;
  Settings* settings_;
  Remarks* remarks_;
};

}  // namespace

const json& Settings::at(std::string_view path) const {
  const auto found = values_.find(path);
  STRATA_ASSERT(found != values_.end());
  read_.insert(found->first);
  return found->second;
}

std::string Settings::first_unread() const {
  for (const auto& [path, value] : values_) {
    if (!read_.contains(path)) return path;
  }
  return {};
}

std::map<std::string, std::string> Settings::canonical() const {
  std::map<std::string, std::string> texts;
  for (const auto& [path, value] : values_) {
    if (!value.is_null()) texts[path] = canonical_text(value);
  }
  return texts;
}

void read_settings(std::span<const Key> keys, const json& object, std::string_view prefix,
                   Settings* settings, Remarks* remarks) {
  Reader reader(keys, settings, remarks);
  reader.read(object, prefix, false);
  reader.fill_defaults();
}

OpenSetting unresolved_auto(std::string_view path, std::string_view wanted,
                            std::string_view example) {
  return {std::string(path),
          fmt::format("{}: \"auto\" is filled in by frameworks such as transformers' Trainer, and "
                      "here nobody has; write {}, for example \"{}\": {}; found \"auto\"",
                      path, wanted, leaf_of(path), example)};
}

}  // namespace strata::engine
