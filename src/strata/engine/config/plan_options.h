// How a configuration wants a model cut into units. Pure; safe everywhere. Errors: none.
#pragma once

#include "strata/engine/config/config.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

plan::PlanOptions plan_options_from(const Config& config);

}  // namespace strata::engine
