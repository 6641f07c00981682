// How much memory drives are staged through: what the configuration says, but not more than keeps
// all that a rank has on them, so that nothing is read again. That is half again its bytes; and
// where weights and states both rest there, so much that what may be leased at once holds any
// unit's states whole: of a unit that an update takes in parts the weights, which gathers take
// whole, would be read again each time. Pure arithmetic on the plan, the same for the engine and
// for its forecast. Units: bytes of one rank, in whole pages.
#pragma once

#include <span>

#include "strata/engine/optimize/update_rule.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

// Lowers the budgets of `options` to it, and to kLeastStaging at least. `shards`: parts that a unit
// is cut into (ShardPlace::count).
void cap_staging(EngineOptions& options, std::span<const plan::ParamSpec> params,
                 const plan::ModelPlan& plan, UpdateRule rule, int shards);

}  // namespace strata::engine
