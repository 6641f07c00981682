#include "strata/engine/config/key.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <vector>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

// cpu_offload and its kin change more than a name; see settings.cpp.
constexpr std::array kAliases{
    Alias{"bfloat16", "bf16"},
    Alias{"zero_optimization.aio", "aio"},  // before what is old in aio
    Alias{"zero_optimization.stage3_gather_fp16_weights_on_model_save",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    Alias{"zero_optimization.gather_16bit_weights_on_model_save",
          "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    Alias{"zero_optimization.prefetch_bucket_size",
          "zero_optimization.stage3_prefetch_bucket_size"},
    Alias{"zero_optimization.module_granularity_threshold",
          "zero_optimization.stage3_module_granularity_threshold"},
    Alias{"zero_optimization.use_all_reduce_for_fetch_params",
          "zero_optimization.stage3_use_all_reduce_for_fetch_params"},
    Alias{"zero_optimization.allgather_sequential",
          "zero_optimization.stage3_allgather_sequential"},
    Alias{"zero_optimization.stage3_allgather_single_param",
          "zero_optimization.stage3_allgather_sequential"},
    Alias{"zero_optimization.param_persistence_threshold",
          "zero_optimization.stage3_param_persistence_threshold"},
    Alias{"zero_optimization.model_persistence_threshold",
          "zero_optimization.stage3_model_persistence_threshold"},
    Alias{"zero_optimization.max_live_parameters", "zero_optimization.stage3_max_live_parameters"},
    Alias{"zero_optimization.max_reuse_distance", "zero_optimization.stage3_max_reuse_distance"},
    Alias{"aio.thread_count", "aio.intra_op_parallelism"},
};

std::vector<Key> join_tables() {
  std::vector<Key> all;
  for (const auto& part : {training_keys(), zero_keys(), offload_keys(), precision_keys(),
                           diagnostics_keys(), feature_keys(), strata_keys()}) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

std::string spelled_choices(std::string_view limits) {
  return fmt::format("{}", fmt::join(choices_in(limits), ", "));
}

std::string with_limits(std::string_view what, std::string_view limits) {
  return limits.empty() ? std::string(what) : fmt::format("{} {}", what, limits);
}

constexpr std::size_t kKeyBytesMax = 256;  // a hostile key must not cost megabytes

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

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

std::span<const Key> config_keys() {
  static const std::vector<Key> kAll = join_tables();
  return kAll;
}

std::span<const Alias> config_aliases() {
  return kAliases;
}

const Key* find_key(std::span<const Key> keys, std::string_view path) {
  const auto found = std::ranges::find(keys, path, &Key::path);
  return found == keys.end() ? nullptr : &*found;
}

std::vector<std::string_view> choices_in(std::string_view limits) {
  std::vector<std::string_view> choices;
  while (!limits.empty()) {
    const auto bar = std::min(limits.find('|'), limits.size());
    choices.push_back(limits.substr(0, bar));
    limits.remove_prefix(std::min(bar + 1, limits.size()));
  }
  return choices;
}

std::string_view leaf_of(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? path : path.substr(dot + 1);
}

std::string_view parent_of(std::string_view path) {
  const auto dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view{} : path.substr(0, dot);
}

std::string join_path(std::string_view parent, std::string_view leaf) {
  return parent.empty() ? std::string(leaf) : fmt::format("{}.{}", parent, leaf);
}

std::string wanted(const Key& key) {
  switch (key.kind) {
    case Kind::kFlag:
      return "true or false";
    case Kind::kInteger:
      return with_limits("an integer", key.limits);
    case Kind::kNumel:
      return with_limits("a number of elements", key.limits);
    case Kind::kBytes:
      return with_limits("bytes as a number or text like \"512MiB\",", key.limits);
    case Kind::kNumber:
      return with_limits("a number", key.limits);
    case Kind::kCount:
      return with_limits("a number or Infinity,", key.limits);
    case Kind::kText:
      return "a text";
    case Kind::kChoice:
      return "one of " + spelled_choices(key.limits);
    case Kind::kWord:
      return fmt::format("one of {} (in any case)", spelled_choices(key.limits));
    case Kind::kStrings:
      return "a list of texts";
    case Kind::kTexts:
      return "a text or a list of texts";
    case Kind::kNumbers:
      return with_limits("a list of numbers,", key.limits);
    case Kind::kPerGroup:
      return with_limits("a number, or a list of one number a parameter group,", key.limits);
    case Kind::kRules:
      return "a list of objects [{ ... }], or \"auto\"";
    case Kind::kSection:
    case Kind::kParams:
    case Kind::kSwitch:
      return "an object { ... }";
  }
  STRATA_ASSERT(false);
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = lower(c);
  return out;
}

int edit_distance(std::string_view a, std::string_view b) {
  const std::size_t width = b.size() + 1;
  std::vector<int> cost((a.size() + 1) * width);
  const auto at = [&](std::size_t i, std::size_t j) -> int& { return cost[i * width + j]; };
  for (std::size_t i = 0; i <= a.size(); ++i) at(i, 0) = static_cast<int>(i);
  for (std::size_t j = 0; j <= b.size(); ++j) at(0, j) = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = lower(a[i - 1]) == lower(b[j - 1]);
      int best = at(i - 1, j - 1) + (same ? 0 : 1);
      best = std::min({best, at(i - 1, j) + 1, at(i, j - 1) + 1});
      if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
          lower(a[i - 2]) == lower(b[j - 1])) {
        best = std::min(best, at(i - 2, j - 2) + 1);
      }
      at(i, j) = best;
    }
  }
  return at(a.size(), b.size());
}

std::string_view nearest_of(std::string_view word, std::span<const std::string_view> known) {
  word = word.substr(0, kKeyBytesMax);
  std::string_view best;
  int fewest = std::numeric_limits<int>::max();
  for (const std::string_view candidate : known) {
    const int edits = edit_distance(word, candidate);
    if (edits < fewest) {
      fewest = edits;
      best = candidate;
    }
  }
  return best;
}

std::string lookalike_of(std::string_view name, bool section) {
  name = name.substr(0, kKeyBytesMax);
  std::string_view found = same_leaf(name, section);
  if (found.empty()) found = near_top_level(name, section);
  if (found.empty()) found = named_section(name);
  return std::string(found);
}

}  // namespace strata::engine
