// How much memory drives are staged through: what the configuration says, but not more than half
// again what a rank has on them. Pure arithmetic on the plan, the same for the engine and for its
// forecast. Units: bytes of one rank, in whole pages.
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
