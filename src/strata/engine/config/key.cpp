#include "strata/engine/config/key.h"

#include <fmt/ranges.h>

#include <algorithm>

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

struct KindName {
  std::string_view name;    // in the tables' text
  std::string_view wanted;  // in messages; before the limits
};
constexpr std::array<KindName, 17> kKinds{{
    {"flag", "true or false"},
    {"integer", "an integer"},
    {"numel", "a number of elements"},
    {"bytes", "bytes as a number or text like \"512MiB\","},
    {"number", "a number"},
    {"count", "a number or Infinity,"},
    {"text", "a text"},
    {"choice", "one of"},
    {"word", "one of"},
    {"strings", "a list of texts"},
    {"texts", "a text or a list of texts"},
    {"numbers", "a list of numbers,"},
    {"per_group", "a number, or a list of one number a parameter group,"},
    {"section", "an object { ... }"},
    {"rules", "a list of objects [{ ... }], or \"auto\""},
    {"params", "an object { ... }"},
    {"switch", "an object { ... }"},
}};
constexpr std::array<std::string_view, 5> kTreatments{"honoured", "shown", "hint", "missed",
                                                      "refused"};

// Takes the part before `mark` off `text`: all of it if there is no mark.
std::string_view take_until(std::string_view& text, std::string_view mark) {
  const auto end = std::min(text.find(mark), text.size());
  const std::string_view part = text.substr(0, end);
  text.remove_prefix(std::min(end + mark.size(), text.size()));
  return part;
}

// `head`: "kind(limits) = default, treatment".
Key key_of(std::string path, std::string_view head, std::string_view meaning,
           std::string_view note) {
  Treatment treatment = Treatment::kHonoured;
  const auto comma = std::min(head.rfind(", "), head.size());
  const auto* named = std::ranges::find(kTreatments, head.substr(std::min(comma + 2, head.size())));
  if (named != kTreatments.end()) {
    treatment = static_cast<Treatment>(named - kTreatments.begin());
    head = head.substr(0, comma);
  }
  std::string_view limits = take_until(head, " = ");
  const auto* kind = std::ranges::find(kKinds, take_until(limits, "("), &KindName::name);
  STRATA_ASSERT(kind != kKinds.end());
  Key key{std::move(path),
          static_cast<Kind>(kind - kKinds.begin()),
          std::string(head),
          std::string(limits.substr(0, limits.find(')'))),
          treatment,
          std::string(meaning),
          has_effect(treatment) ? "" : std::string(note)};
  const bool object = key.kind == Kind::kSection || key.kind == Kind::kParams;
  if (head.empty()) key.fallback = object ? "{}" : "null";
  std::erase(key.fallback, ' ');  // between the lines of a list
  if (key.kind == Kind::kSwitch) std::erase(key.limits, ' ');
  return key;
}

void read_tables(std::string_view text, std::vector<KeyTable>& tables) {
  std::vector<std::string> names;  // of the sections around a row
  std::string note;
  while (!text.empty()) {
    std::string line(take_until(text, "\n"));
    while (text.starts_with(' ')) {
      const std::string_view more = take_until(text, "\n");
      line += more.substr(more.find_first_not_of(' ') - 1);
    }
    if (line.empty()) continue;
    if (line.starts_with("# ")) {
      tables.push_back({line.substr(2), {}});
      continue;
    }
    std::string_view row = line;
    const std::size_t depth = row.find_first_not_of('.');
    row.remove_prefix(depth);
    const std::string_view name = take_until(row, " ");
    names.resize(depth);
    names.push_back(join_path(depth == 0 ? "" : names.back(), name));
    if (row.empty()) continue;
    const std::string_view head = take_until(row, " | ");
    const std::string_view meaning = take_until(row, " | ");
    if (!row.empty()) note = row;
    tables.back().keys.push_back(key_of(names.back(), head, meaning, note));
  }
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
  for (const KeyTable& table : key_tables()) {
    for (const Key& key : table.keys) {
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
  constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kSections{
      {{"zero", "zero_optimization"},
       {"optim", "optimizer"},
       {"sched", "scheduler"},
       {"bf16", "bf16"},
       {"fp16", "fp16"},
       {"strata", "strata"}}};
  const std::string small = lower_case(name);
  for (const auto& [word, section] : kSections) {
    if (small.find(word) != std::string::npos) return section;
  }
  return {};
}

}  // namespace

std::span<const KeyTable> key_tables() {
  static const std::vector<KeyTable> kTables = [] {
    std::vector<KeyTable> tables;
    for (const std::string_view text : {kTrainingTables, kFeatureTables}) read_tables(text, tables);
    return tables;
  }();
  return kTables;
}

std::span<const Key> keys_of(std::string_view title) {
  const auto found = std::ranges::find(key_tables(), title, &KeyTable::title);
  return found == key_tables().end() ? std::span<const Key>() : found->keys;
}

std::span<const Key> config_keys() {
  static const std::vector<Key> kAll = [] {
    std::vector<Key> all;
    for (const KeyTable& table : key_tables()) {
      if (table.title.find(".params of ") == std::string::npos)
        all.insert(all.end(), table.keys.begin(), table.keys.end());
    }
    return all;
  }();
  return kAll;
}

std::span<const Key> adam_keys() {
  return keys_of("optimizer.params of Adam and AdamW");
}

std::span<const Key> scheduler_keys(std::string_view type) {
  return keys_of(fmt::format("scheduler.params of {}", type));
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
  while (!limits.empty()) choices.push_back(take_until(limits, "|"));
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
  const std::string_view what = kKinds.at(static_cast<std::size_t>(key.kind)).wanted;
  if (key.kind == Kind::kChoice || key.kind == Kind::kWord)
    return fmt::format("{} {}{}", what, fmt::join(choices_in(key.limits), ", "),
                       key.kind == Kind::kWord ? " (in any case)" : "");
  const bool limited = !key.limits.empty() && key.kind != Kind::kSwitch;
  return limited ? fmt::format("{} {}", what, key.limits) : std::string(what);
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(), lower);
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
  const auto best = std::ranges::min_element(
      known, {}, [&](std::string_view candidate) { return edit_distance(word, candidate); });
  return best == known.end() ? std::string_view() : *best;
}

std::string lookalike_of(std::string_view name, bool section) {
  name = name.substr(0, kKeyBytesMax);
  std::string_view found = same_leaf(name, section);
  if (found.empty()) found = near_top_level(name, section);
  if (found.empty()) found = named_section(name);
  return std::string(found);
}

}  // namespace strata::engine
