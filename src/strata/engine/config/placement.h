// Rules that place single parameters: strata.placement, and the share of optimizer state that
// offload_optimizer.ratio names. A rule names parameters, by a pattern of their names, by their
// size, or by both, and a place for their weights, for their optimizer state, or for both. If
// several rules name a parameter, the first one that names a place counts.
//
// Pure functions of plain values. Errors: ConfigError for rules that say nothing or too much.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "strata/base/units.h"
#include "strata/memory/ledger.h"
#include "strata/plan/param_spec.h"

namespace strata::engine {

class Settings;
struct OffloadConfig;

struct PlacementRule {
  std::string match = "*";  // of whole names, as shells have it: *, ?, [...]
  Bytes larger_than{-1};    // in the parameter's own dtype
  std::optional<memory::Tier> param;
  std::optional<memory::Tier> optimizer;
};

// "none" or "device", "cpu" or "host", "nvme".
memory::Tier tier_named(std::string_view device);

// Whether strata.placement is "auto", instead of rules.
bool places_automatically(const Settings& settings);
std::vector<PlacementRule> read_placement(const Settings& settings);

// Writes ParamSpec::place of each, in their order.
void place_params(std::vector<plan::ParamSpec>& params, const OffloadConfig& offload);

// The parameters that a rule has placed.
struct RuleUse {
  std::string rule;  // "*embed*: weights on the host", as people read it
  std::int64_t params = 0;
  Bytes bytes;  // of the whole parameters, in their own dtype
};

// One for each rule, in their order; also for those that no parameter met.
std::vector<RuleUse> rule_uses(const std::vector<plan::ParamSpec>& params,
                               const OffloadConfig& offload);

}  // namespace strata::engine
