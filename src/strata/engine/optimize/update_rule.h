// The rule that updates the shards, and the form of the masters that it needs. Pure functions.
// Errors: ConfigError for settings that do not fit the rule.
#pragma once

#include "strata/base/error.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/plan/master_form.h"

namespace strata::engine {

enum class UpdateRule { kNone, kAdam, kAdamW, kExternal };

// A user's optimizer sees fp32 masters; Adam and AdamW work on weights and remainders, or round.
inline plan::Masters masters_for(UpdateRule rule, const EngineOptions& options) {
  if (rule == UpdateRule::kExternal && options.rounds_masters) {
    throw ConfigError(
        "bf16.bf16_master_weights_and_grads: is for Adam and AdamW, which round what they compute "
        "themselves; remove the key, or take one of these; found another optimizer");
  }
  if (rule == UpdateRule::kExternal) return plan::Masters::kFloat32;
  return options.rounds_masters ? plan::Masters::kRounded : plan::Masters::kRemainder;
}

}  // namespace strata::engine
