// The rules by which parameters are updated, and the states that each of them keeps for every
// element of a parameter, by name. Pure functions; safe everywhere.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "strata/base/error.h"

namespace strata::plan {

enum class UpdateRule : std::uint8_t {
  kNone,   // no optimizer
  kAdam,   // with L2
  kAdamW,  // with decoupled decay
  kLion,
  kMuon,      // orthogonalized momentum of matrices; only beside a rule of the job
  kExternal,  // an optimizer of the user's, which keeps its states itself
  kWhole,     // the same, and it needs whole parameters
  kTogether,  // the same, and it needs all of them in one place
};

// How the engine keeps a state: as numbers, or in 8 bits (kernels/states8.h): a code for each
// element, and a scale for each block of kBlock8, counted from the parameter's first element.
enum class StateForm : std::uint8_t { kNumbers, k8Bit };
inline constexpr std::int64_t kBlock8 = 256;
// The suffix of a state's name for its scales.
inline constexpr std::string_view kScales = ".scales";

inline StateForm form_of_bits(int bits) {
  STRATA_ASSERT(bits == 8 || bits == 32);
  return bits == 8 ? StateForm::k8Bit : StateForm::kNumbers;
}

// Names of states, as users and checkpoints know them.
inline constexpr std::string_view kExpAvg = "exp_avg";
inline constexpr std::string_view kExpAvgSq = "exp_avg_sq";
inline constexpr std::string_view kMomentumBuffer = "momentum_buffer";

struct RuleTraits {
  UpdateRule rule = UpdateRule::kNone;
  std::string_view name;
  std::span<const std::string_view> states;  // that the engine keeps, in the order of their blocks
};

inline const RuleTraits& traits_of(UpdateRule rule) {
  static constexpr std::string_view kMoments[] = {kExpAvg, kExpAvgSq};
  static constexpr std::string_view kMean[] = {kExpAvg};
  static constexpr std::string_view kMomentum[] = {kMomentumBuffer};
  static constexpr std::array<RuleTraits, 8> kRules{{{UpdateRule::kNone, "none", {}},
                                                     {UpdateRule::kAdam, "adam", kMoments},
                                                     {UpdateRule::kAdamW, "adamw", kMoments},
                                                     {UpdateRule::kLion, "lion", kMean},
                                                     {UpdateRule::kMuon, "muon", kMomentum},
                                                     {UpdateRule::kExternal, "external", {}},
                                                     {UpdateRule::kWhole, "whole", {}},
                                                     {UpdateRule::kTogether, "together", {}}}};
  return kRules[static_cast<std::size_t>(rule)];
}

inline std::span<const std::string_view> states_of(UpdateRule rule) {
  return traits_of(rule).states;
}

// Whether the user's optimizer computes the update.
inline bool is_external(UpdateRule rule) {
  return rule >= UpdateRule::kExternal;
}

// Whether the engine does.
inline bool is_native(UpdateRule rule) {
  return rule != UpdateRule::kNone && !is_external(rule);
}

inline UpdateRule rule_named(std::string_view name) {
  for (const UpdateRule rule :
       {UpdateRule::kNone, UpdateRule::kAdam, UpdateRule::kAdamW, UpdateRule::kLion,
        UpdateRule::kMuon, UpdateRule::kExternal, UpdateRule::kWhole, UpdateRule::kTogether}) {
    if (traits_of(rule).name == name) return rule;
  }
  STRATA_ASSERT(false);
}

// The rule of a parameter or unit: `own`, where it has one and the job's optimizer is native.
inline UpdateRule rule_of(std::optional<UpdateRule> own, UpdateRule of_job) {
  return is_native(of_job) ? own.value_or(of_job) : of_job;
}

}  // namespace strata::plan
