// Plans a model from its description and a configuration, without memory: the parameters' specs,
// the units and scopes, and from these the bytes that a rank's device will hold. Pure functions.
#pragma once

#include <vector>

#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/forecast/auto_placement.h"
#include "strata/forecast/memory_forecast.h"
#include "strata/plan/module_tree.h"
#include "strata/plan/unit_plan.h"
#include "strata/torch/model/model_input.h"

namespace strata::torch {

struct PlannedModel {
  std::vector<plan::ParamSpec> specs;  // in the dtype that they compute in
  plan::ModelPlan plan;
  plan::ModuleTree tree;
};

// `room`: the bytes that a rank may hold, the same on all ranks; used if the configuration leaves
// placement to the engine. Errors: ConfigError for a trainable parameter whose dtype cannot be
// trained; OutOfMemoryError of forecast::place_automatically().
PlannedModel plan_model(const ModelInput& input, const engine::Config& config,
                        const forecast::Trainers& trainers, const forecast::Room& room);

// The plan, in which parameters that were unfrozen since are trainable.
plan::ModelPlan plan_now(const PlannedModel& model, const engine::Weights& weights);
// The options of an engine for this model. If parameters keep their dtypes, numbers of elements in
// the configuration become bytes by the width of the dtype that most elements have.
engine::EngineOptions engine_options_of(const PlannedModel& model, const engine::Config& config);

// The forecast of a job that does not run. `config.batch` must be complete for its number of ranks.
// `free`: memory free on a device and, per rank, on its host; used if placement is automatic.
// Errors: those of forecast::traits_of_job() and of plan_model().
forecast::MemoryForecast forecast_job(const ModelInput& input, const engine::Config& config,
                                      engine::UpdateRule rule, const forecast::Job& job,
                                      const forecast::FreeMemory& free);

}  // namespace strata::torch
