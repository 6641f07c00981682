#include "strata/engine/config/placement.h"

#include <fmt/core.h>
#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "strata/base/error.h"
#include "strata/engine/config/offload_config.h"
#include "strata/engine/config/settings.h"
#include "strata/engine/config/value_check.h"

namespace strata::engine {
namespace {

using nlohmann::json;

constexpr std::string_view kPlacement = "strata.placement";
constexpr std::array<std::string_view, 5> kPlaces{"device", "host", "nvme", "none", "cpu"};

[[noreturn]] void refuse_rule(std::size_t index, std::string_view key, std::string_view wanted,
                              const json& found) {
  throw ConfigError(fmt::format("{}[{}]{}{}: wanted {}; found {}", kPlacement, index,
                                key.empty() ? "" : ".", key, wanted, shown(found)));
}

memory::Tier place_in(std::size_t index, std::string_view key, const json& value) {
  if (!value.is_string() || std::ranges::find(kPlaces, value.get<std::string>()) == kPlaces.end())
    refuse_rule(index, key, "one of device, host, nvme", value);
  return tier_named(value.get<std::string>());
}

Bytes size_in(std::size_t index, std::string_view key, const json& value) {
  std::optional<double> bytes;
  if (value.is_number()) bytes = value.get<double>();
  if (value.is_string()) bytes = parse_size(value.get<std::string>(), SizeText::kExact);
  if (!bytes || *bytes < 0)
    refuse_rule(index, key, "bytes as a number or text like \"200MB\"", value);
  return Bytes(clamped(*bytes));
}

PlacementRule rule_of(std::size_t index, const json& object) {
  PlacementRule rule;
  bool names = false;
  for (const auto& [key, value] : object.items()) {
    if (key == "match") {
      if (!value.is_string()) refuse_rule(index, key, "a pattern of names", value);
      rule.match = value.get<std::string>();
      names = true;
    } else if (key == "larger_than") {
      rule.larger_than = size_in(index, key, value);
      names = true;
    } else if (key == "param") {
      rule.param = place_in(index, key, value);
    } else if (key == "optimizer") {
      rule.optimizer = place_in(index, key, value);
    } else {
      refuse_rule(index, "", "the keys match, larger_than, param, optimizer", key);
    }
  }
  if (!names) refuse_rule(index, "", "match or larger_than, which say what is placed", object);
  if (!rule.param && !rule.optimizer)
    refuse_rule(index, "", "param or optimizer, which say where it is placed", object);
  return rule;
}

bool names(const PlacementRule& rule, const plan::ParamSpec& param) {
  return fnmatch(rule.match.c_str(), param.name.c_str(), 0) == 0 &&
         bytes_of(param.numel(), param.dtype) > rule.larger_than;
}

// The last parameters, of which all but `ratio` of the elements stay on the device.
void keep_share(std::vector<plan::ParamSpec>& params, double ratio) {
  Numel all;
  for (const plan::ParamSpec& param : params) all += param.trainable ? param.numel() : Numel();
  Numel seen;
  for (plan::ParamSpec& param : params) {
    if (!param.trainable) continue;
    // A parameter goes with its middle, so that the share is missed by half of one at most.
    const Numel middle = seen + Numel(param.numel().value / 2);
    seen += param.numel();
    const bool offloads =
        static_cast<double>((all - middle).value) < ratio * static_cast<double>(all.value);
    if (!offloads && !param.place.states) param.place.states = memory::Tier::kDevice;
  }
}

std::string text_of(const PlacementRule& rule) {
  std::string text = rule.match;
  if (rule.larger_than.value >= 0) text += fmt::format(" over {}", to_string(rule.larger_than));
  std::string_view before = ": ";
  const auto add = [&](std::string_view what, std::optional<memory::Tier> tier) {
    if (!tier) return;
    text += fmt::format("{}{} on {}", before, what, memory::name_of(*tier));
    before = ", ";
  };
  add("weights", rule.param);
  add("states", rule.optimizer);
  return text;
}

}  // namespace

memory::Tier tier_named(std::string_view device) {
  if (device == "cpu" || device == "host") return memory::Tier::kHost;
  return device == "nvme" ? memory::Tier::kNvme : memory::Tier::kDevice;
}

bool places_automatically(const Settings& settings) {
  return settings.at(kPlacement) == "auto";
}

std::vector<PlacementRule> read_placement(const Settings& settings) {
  std::vector<PlacementRule> rules;
  if (places_automatically(settings)) return rules;
  for (const json& object : settings.at(kPlacement)) rules.push_back(rule_of(rules.size(), object));
  return rules;
}

void place_params(std::vector<plan::ParamSpec>& params, const OffloadConfig& offload) {
  for (plan::ParamSpec& param : params) {
    for (const PlacementRule& rule : offload.rules) {
      if (!names(rule, param)) continue;
      if (!param.place.weights) param.place.weights = rule.param;
      if (!param.place.states && param.trainable) param.place.states = rule.optimizer;
    }
  }
  if (offload.optimizer != memory::Tier::kDevice && offload.ratio < 1.0)
    keep_share(params, offload.ratio);
}

std::vector<RuleUse> rule_uses(const std::vector<plan::ParamSpec>& params,
                               const OffloadConfig& offload) {
  std::vector<RuleUse> uses;
  for (const PlacementRule& rule : offload.rules) uses.push_back({text_of(rule), 0, Bytes()});
  for (const plan::ParamSpec& param : params) {
    bool weights = false;
    bool states = !param.trainable;
    for (std::size_t r = 0; r < uses.size(); ++r) {
      const PlacementRule& rule = offload.rules[r];
      if (!names(rule, param)) continue;
      const bool places = (rule.param && !weights) || (rule.optimizer && !states);
      weights = weights || rule.param;
      states = states || rule.optimizer;
      if (!places) continue;
      ++uses[r].params;
      uses[r].bytes += bytes_of(param.numel(), param.dtype);
    }
  }
  return uses;
}

}  // namespace strata::engine
