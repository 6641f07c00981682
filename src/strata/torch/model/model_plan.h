// What a model and a configuration make of each other, before any memory depends on it: the
// parameters' specs, the units and scopes, and from these what a rank's device will hold. Pure
// functions.
#pragma once

#include <span>
#include <vector>

#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/forecast/memory_forecast.h"
#include "strata/plan/module_tree.h"
#include "strata/plan/unit_plan.h"
#include "strata/torch/ranks/job_carriers.h"

namespace strata::torch {

struct ModelInput;

// In the dtype that they are trained in.
std::vector<plan::ParamSpec> param_specs(const ModelInput& input, const engine::Config& config);

plan::ModelPlan plan_model(std::span<const plan::ParamSpec> specs, const plan::ModuleTree& tree,
                           const engine::Config& config);

// Of a job that does not run. `config.batch` must be complete for that many ranks. Errors: of
// carriers_of_job().
forecast::MemoryForecast forecast_job(const ModelInput& input, const engine::Config& config,
                                      engine::UpdateRule rule, const Job& job);

}  // namespace strata::torch
