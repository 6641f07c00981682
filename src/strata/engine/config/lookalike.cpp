#include "strata/engine/config/lookalike.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "strata/engine/config/key.h"
#include "strata/engine/config/nearest.h"

namespace strata::engine {
namespace {

constexpr std::size_t kLongest = 256;  // a hostile key must not cost megabytes

bool is_section(const Key& key) {
  return key.kind == Kind::kSection || key.kind == Kind::kSwitch || key.kind == Kind::kParams;
}

bool spelled_alike(std::string_view a, std::string_view b) {
  const auto allowed = std::max<std::size_t>(1, std::max(a.size(), b.size()) / 4);
  return edit_distance(a, b) <= static_cast<int>(allowed);
}

bool contains_other(std::string_view a, std::string_view b) {
  constexpr std::size_t kTelling = 8;
  if (a.size() < b.size()) std::swap(a, b);
  return b.size() >= kTelling && a.find(b) != std::string_view::npos;
}

// The right key in the wrong section.
std::string_view same_leaf(std::string_view name, bool section) {
  std::vector<std::span<const Key>> tables{config_keys(), adam_keys()};
  for (const std::string_view type : scheduler_types()) tables.push_back(scheduler_keys(type));
  for (const auto table : tables) {
    for (const Key& key : table) {
      const bool has_effect = key.treatment == Treatment::kHonoured || is_section(key);
      if (has_effect && is_section(key) == section && leaf_of(key.path) == name) return key.path;
    }
  }
  return {};
}

std::string_view near_top_level(std::string_view name, bool section) {
  std::vector<std::string_view> near;
  const std::string small = lower_case(name);
  for (const Key& key : config_keys()) {
    if (!parent_of(key.path).empty()) continue;
    const bool honoured = key.treatment == Treatment::kHonoured && is_section(key) == section;
    if (spelled_alike(name, key.path) || (honoured && contains_other(small, key.path)))
      near.push_back(key.path);
  }
  for (const Alias& alias : config_aliases()) {
    if (parent_of(alias.old_path).empty() && spelled_alike(name, alias.old_path))
      near.push_back(alias.path);
  }
  return nearest_of(name, near);
}

std::string_view named_section(std::string_view name) {
  struct Word {
    std::string_view word;
    std::string_view section;
  };
  constexpr std::array<Word, 6> kWords{{{"zero", "zero_optimization"},
                                        {"optim", "optimizer"},
                                        {"sched", "scheduler"},
                                        {"bf16", "bf16"},
                                        {"fp16", "fp16"},
                                        {"strata", "strata"}}};
  const std::string small = lower_case(name);
  for (const Word& w : kWords) {
    if (small.find(w.word) != std::string::npos) return w.section;
  }
  return {};
}

}  // namespace

std::string lookalike_of(std::string_view name, const nlohmann::json& value) {
  name = name.substr(0, kLongest);
  const bool section = value.is_object();
  std::string_view found = same_leaf(name, section);
  if (found.empty()) found = near_top_level(name, section);
  if (found.empty()) found = named_section(name);
  return std::string(found);
}

}  // namespace strata::engine
