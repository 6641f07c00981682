// The memory through which drives are staged: the configured budget, or less if less holds all
// bytes of a rank on drives, so that nothing is read again. Less is one and a half times those
// bytes. If weights and states both rest on drives, it is also enough that leases at once hold the
// states of any unit whole. Otherwise an update would take such a unit in parts, and gathers, which
// take weights whole, would read its weights again each time. Pure arithmetic on the plan, the same
// for the engine and for its forecast. Units: bytes of one rank, in whole pages.
#pragma once

#include <span>

#include "strata/engine/optimize/update_rule.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

// Lowers the budgets of `options` to that memory, but not below kLeastStaging. `shards`: the parts
// into which a unit is cut (ShardPosition::count).
void cap_staging(EngineOptions& options, std::span<const plan::ParamSpec> params,
                 const plan::ModelPlan& plan, UpdateRule rule, int shards);

}  // namespace strata::engine
