#include "strata/engine/config/settings.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <utility>

#include "strata/engine/config/config_text.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Top-level keys that callers fill in, so "auto" there means: not given.
constexpr std::array<std::string_view, 3> kFilledByCallers{
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"};

bool is_numeric(const Key& key) {
  return key.kind == Kind::kNumber || key.kind == Kind::kNumbers || key.kind == Kind::kInteger ||
         key.kind == Kind::kPerGroup;
}

// Whether a default in place of the user's choice would change the results of training.
bool changes_results(const Key& key) {
  if (key.treatment != Treatment::kHonoured) return false;
  for (const std::string_view path : {"gradient_clipping", "communication_data_type",
                                      "zero_optimization.stage", "scheduler.type"}) {
    if (key.path == path) return true;
  }
  const std::string_view section = parent_of(key.path);
  if (section == "optimizer.params" || section == "scheduler.params") return is_numeric(key);
  return section == "bf16" || section == "fp16" || section == "torch_autocast" ||
         section == "data_types";
}

// The meaning of an absent key.
std::string default_of(const Key& key) {
  const bool plain = key.fallback != "null" && key.kind != Kind::kSection;
  return plain ? fmt::format("its default, {}", key.fallback) : "its default";
}

// A value that a reader can copy, where the table has no default.
std::string example_of(const Key& key) {
  if (key.kind == Kind::kFlag) return "true";
  if (key.kind == Kind::kChoice || key.kind == Kind::kWord)
    return fmt::format("\"{}\"", key.limits.substr(0, key.limits.find('|')));
  if (key.fallback != "null") return std::string(key.fallback);
  return key.kind == Kind::kInteger ? "1000" : "0.001";
}

class Reader {
 public:
  Reader(std::span<const Key> keys, Settings* settings, ConfigFindings* remarks)
      : keys_(keys), settings_(settings), findings_(remarks) {}

  void read(const json& object, std::string_view prefix, bool quiet) {
    for (const auto& [name, value] : object.items()) {
      const std::string path = join_path(prefix, name);
      try {
        read_key(name, path, value, prefix, quiet);
      } catch (const ConfigError& error) {
        record_error(error, path, value, findings_);
      }
    }
  }

  void fill_defaults() {
    for (const Key& key : keys_) {
      if (key.kind == Kind::kSection) continue;
      if (key.treatment == Treatment::kShown) findings_->shown.emplace(key.path, key.fallback);
      if (key.treatment == Treatment::kHonoured && !settings_->has(key.path))
        settings_->set(key.path, json::parse(key.fallback));
    }
  }

 private:
  void read_key(const std::string& name, const std::string& path, const json& value,
                std::string_view prefix, bool quiet) {
    if (prefix.empty() && name.find('.') != std::string::npos) {
      record_hint(name, value,
                  "a key with a dot names nothing; nest it: {\"section\": {\"key\": value}}");
      return;
    }
    const Key* key = find_key(keys_, path);
    if (key == nullptr) {
      if (!prefix.empty()) refuse_unknown(path, nearest_to(path, prefix), value);
      return take_unknown(name, value);
    }
    if (!is_given(*key, value, prefix, quiet)) return;
    if (key->kind != Kind::kSection) return take(*key, value, quiet);
    if (!value.is_object()) refuse_value(*key, value);
    read(value, path, quiet || is_switched_off(*key, value));
  }

  void note(std::string_view path, Verdict verdict, const json& value, std::string reason) {
    findings_->findings.push_back({std::string(path), verdict, shown(value), std::move(reason)});
  }

  void record_hint(std::string_view path, const json& value, std::string_view reason,
                   bool missed = false) {
    findings_->hints.push_back({std::string(path), std::string(reason), missed});
    note(path, Verdict::kHint, value, std::string(reason));
  }

  // `quiet`: the section is switched off.
  bool is_given(const Key& key, const json& value, std::string_view prefix, bool quiet) {
    if (key.treatment == Treatment::kRefused) return true;  // off, or refused
    if (value.is_null()) {
      const bool missed = changes_results(key) && is_numeric(key) && key.fallback != "null";
      if (missed && !quiet)
        throw ConfigError(fmt::format(
            "{}: null is no value of it, and trained numbers would depend on what it "
            "is taken for; write {} ({}), or remove the key, which gives {}; found null",
            key.path, wanted(key), key.meaning, key.fallback));
      note(key.path, Verdict::kHonoured, value, "not given: " + default_of(key));
      return false;
    }
    if (value != "auto" || key.kind == Kind::kRules) return true;
    if (changes_results(key) && !(quiet && leaf_of(key.path) != "enabled")) {
      findings_->open.push_back(unresolved_auto(
          key.path, fmt::format("{} ({})", wanted(key), key.meaning), example_of(key)));
      note(key.path, Verdict::kOpen, value, std::string(key.meaning));
      return false;
    }
    const bool filled = std::ranges::find(kFilledByCallers, key.path) != kFilledByCallers.end();
    if (filled) note(key.path, Verdict::kOpen, value, std::string(key.meaning));
    if (!prefix.empty())
      note(key.path, Verdict::kHonoured, value,
           fmt::format("{}, where no framework fills it in", default_of(key)));
    if (!prefix.empty()) return false;
    if (!filled && key.kind != Kind::kText)
      throw ConfigError(
          "{}: \"auto\" is filled in by the caller of other keys, not of this one; write {} ({}) "
          "or remove the key; found \"auto\"",
          key.path, wanted(key), key.meaning);
    return false;
  }

  // A section that is disabled asks for nothing, so hints in it need not be listed.
  bool is_switched_off(const Key& section, const json& object) const {
    if (is_disabled(object)) return true;
    const std::string path = join_path(section.path, "enabled");
    const Key* key = find_key(keys_, path);
    if (key == nullptr || key->treatment == Treatment::kRefused) return false;
    return !object.contains("enabled") && key->fallback != "true";
  }

  void take(const Key& key, const json& value, bool quiet) {
    if (key.treatment == Treatment::kRefused) return take_refused(key, value);
    json checked = check_value(key, value);
    if (has_effect(key.treatment)) {
      // The optimizer's and the scheduler's are read one by one.
      if (key.kind != Kind::kParams)
        note(key.path, Verdict::kHonoured, value, std::string(key.meaning));
      if (key.treatment == Treatment::kShown) {
        findings_->shown[std::string(key.path)] = canonical_text(checked);
        findings_->shown_given.emplace(key.path);
      } else {
        settings_->set(std::string(key.path), std::move(checked));
      }
      return;
    }
    findings_->hint_values.emplace(key.path, canonical_text(checked));
    if (quiet) {
      note(key.path, Verdict::kOff, value, "its section is off");
    } else {
      const bool asks = checked != json::parse(key.fallback);
      record_hint(key.path, value, key.note, asks && key.treatment == Treatment::kMissed);
    }
  }

  void take_refused(const Key& key, const json& value) {
    if (leaves_off(key, value)) {
      // DeepSpeed has a default for each of its settings, by which some are on.
      if (value.is_object() && value.empty())
        findings_->hints.push_back(
            {std::string(key.path),
             fmt::format("an empty section counts as off: {}", key.meaning)});
      note(key.path, Verdict::kOff, value, std::string(key.meaning));
      return;
    }
    if (key.kind == Kind::kSwitch && !value.is_object() && !flag_in(value))
      refuse_value(key, value);
    if (key.kind == Kind::kSwitch || check_value(key, value) != json::parse(key.fallback))
      throw RefusedFeature("{}: not supported ({}); {}; found {}", key.path, key.meaning, key.note,
                           shown(value));
  }

  // A top-level key of no table: a misspelled one, or the user's own, for another program.
  void take_unknown(const std::string& name, const json& value) {
    const std::string near = lookalike_of(name, value.is_object());
    if (!near.empty()) refuse_unknown(name, near, value);
    const char* reason =
        "no key of DeepSpeed or Strata has a name like it, so it is taken for your own";
    findings_->hints.push_back({name, reason});
    note(name, Verdict::kOwn, value, reason);
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
        "{}: unknown key; the nearest known one is \"{}\"; write that or remove the key; found {}",
        path, near, shown(value));
  }

  std::span<const Key> keys_;
  Settings* settings_;
  ConfigFindings* findings_;
};

[[noreturn]] void refuse_both(std::string_view old_path, std::string_view path) {
  throw ConfigError("{}: an old spelling of \"{}\", which is given too; remove the old one",
                    old_path, path);
}

bool flag_of(std::string_view path, const json& value) {
  if (value.is_null() || value == "auto") return false;
  const auto flag = flag_in(value);
  if (!flag)
    throw ConfigError(
        "{}: wanted true or false (an old spelling of the offload sections); found {}", path,
        shown(value));
  return *flag;
}

void record_old_spelling(std::string_view old_path, std::string_view path, const json& value,
                         ConfigFindings* remarks) {
  remarks->findings.push_back(
      {std::string(old_path), Verdict::kOldSpelling, shown(value), fmt::format("write {}", path)});
}

// Takes the value of an old key out of the document. `renew` writes it to today's key, which it
// returns: "" where the value says nothing.
template <typename Renew>
void replace_old(ordered_json* document, std::string_view old_path, ConfigFindings* remarks,
                 const Renew& renew) {
  ordered_json* holder = holder_of(document, old_path);
  const std::string name(leaf_of(old_path));
  if (holder == nullptr || !holder->contains(name)) return;
  const ordered_json value = std::move((*holder)[name]);
  holder->erase(name);
  try {
    const std::string path = renew(value);
    if (!path.empty()) record_old_spelling(old_path, path, value, remarks);
  } catch (const ConfigError& error) {
    record_error(error, old_path, value, remarks);
  }
}

// The booleans that became sections: "cpu_offload": true is "offload_optimizer": {"device": "cpu"}.
void apply_offload_flags(ordered_json* document, ConfigFindings* remarks) {
  constexpr std::string_view kPin = "zero_optimization.cpu_offload_use_pin_memory";
  bool pinned = true;
  replace_old(document, kPin, remarks, [&](const ordered_json& value) -> std::string {
    if (value.is_null()) return "";
    pinned = flag_of(kPin, value);
    return "pin_memory in the offload sections";
  });
  constexpr std::array<std::array<std::string_view, 2>, 2> kFlags{
      {{"zero_optimization.cpu_offload", "zero_optimization.offload_optimizer"},
       {"zero_optimization.cpu_offload_param", "zero_optimization.offload_param"}}};
  for (const auto& names : kFlags) {  // a lambda of clang 14 takes no structured binding
    const std::string_view old_path = names[0];
    const std::string_view path = names[1];
    replace_old(document, old_path, remarks, [&](const ordered_json& value) {
      if (flag_of(old_path, value)) {
        ordered_json& section = (*holder_of(document, path))[std::string(leaf_of(path))];
        if (!section.is_null()) refuse_both(old_path, path);
        section = {{"device", "cpu"}, {"pin_memory", pinned}};
      }
      return fmt::format("{}.device: \"cpu\"", path);
    });
  }
}

}  // namespace

const json& Settings::at(std::string_view path) const {
  const auto found = values_.find(path);
  STRATA_ASSERT(found != values_.end());
  read_.insert(found->first);
  return found->second;
}

std::size_t Settings::choice_at(std::string_view path) const {
  const Key* key = find_key(config_keys(), path);
  STRATA_ASSERT(key != nullptr);
  const auto choices = choices_in(key->limits);
  const auto found = std::ranges::find(choices, text(path));
  STRATA_ASSERT(found != choices.end());
  return static_cast<std::size_t>(found - choices.begin());
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
                   Settings* settings, ConfigFindings* remarks) {
  Reader reader(keys, settings, remarks);
  reader.read(object, prefix, false);
  reader.fill_defaults();
}

void record_error(const ConfigError& error, std::string_view path, const json& value,
                  ConfigFindings* remarks) {
  if (!remarks->collects) throw;
  std::string reason = error.what();
  if (reason.starts_with(std::string(path) + ": ")) reason = reason.substr(path.size() + 2);
  // The value stands beside it.
  if (const auto found = reason.rfind("; found "); found != std::string::npos) reason.resize(found);
  const bool feature = dynamic_cast<const RefusedFeature*>(&error) != nullptr;
  remarks->findings.push_back({std::string(path), feature ? Verdict::kRefused : Verdict::kWrong,
                               shown(value), std::move(reason)});
}

OpenSetting unresolved_auto(std::string_view path, std::string_view wanted,
                            std::string_view example) {
  return {std::string(path),
          fmt::format("{}: \"auto\" is filled in by frameworks such as transformers' Trainer, and "
                      "here none has; write {}, for example \"{}\": {}; found \"auto\"",
                      path, wanted, leaf_of(path), example)};
}

ordered_json* holder_of(ordered_json* document, std::string_view path) {
  const std::string_view parent = parent_of(path);
  if (parent.empty()) return document;
  ordered_json* holder = holder_of(document, parent);
  if (holder == nullptr) return nullptr;
  const auto found = holder->find(std::string(leaf_of(parent)));
  return found == holder->end() || !found->is_object() ? nullptr : &*found;
}

void apply_aliases(ordered_json* document, ConfigFindings* remarks) {
  const auto zero = document->find("zero_optimization");
  if (zero != document->end() && zero->is_boolean()) {  // true is stage 1
    const int stage = zero->get<bool>() ? 1 : 0;
    record_old_spelling(zero.key(), fmt::format("zero_optimization.stage: {}", stage), *zero,
                        remarks);
    *zero = {{"stage", stage}};
  }
  for (const Alias& alias : config_aliases()) {
    const ordered_json* holder = holder_of(document, alias.old_path);
    const ordered_json before = holder == nullptr ? ordered_json() : *holder;
    replace_old(document, alias.old_path, remarks, [&](const ordered_json& value) {
      ordered_json* target = holder_of(document, alias.path);
      STRATA_ASSERT(target != nullptr);
      const std::string name(leaf_of(alias.path));
      if (target->contains(name)) refuse_both(alias.old_path, alias.path);
      (*target)[name] = value;
      if (target == holder) {
        target->clear();
        for (const auto& [old, member] : before.items())
          (*target)[old == leaf_of(alias.old_path) ? name : old] = member;
      }
      return std::string(alias.path);
    });
  }
  apply_offload_flags(document, remarks);
}

}  // namespace strata::engine
