// What a model and a configuration make of each other, before any memory depends on it: the
// parameters' specs, the units and scopes, and from these what a rank's device will hold. Pure
// functions.
#pragma once

#include <vector>

#include "strata/engine/config/config.h"
#include "strata/engine/engine.h"
#include "strata/forecast/auto_placement.h"
#include "strata/forecast/job_traits.h"
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

// `room`: what a rank may hold, the same on all of them, where the configuration leaves placement
// to the engine. Errors: ConfigError for a trainable parameter of a dtype that nothing can be
// trained in; OutOfMemoryError of forecast::place_automatically().
PlannedModel plan_model(const ModelInput& input, const engine::Config& config,
                        const forecast::Trainers& trainers, const forecast::Room& room);

// Of an engine for this model. Where parameters keep their dtypes, numbers of elements in the
// configuration become bytes with the width of the one that most elements have.
// The plan, in which what was frozen and is trained by now is trainable.
plan::ModelPlan plan_now(const PlannedModel& model, const engine::Weights& weights);
engine::EngineOptions engine_options_of(const PlannedModel& model, const engine::Config& config);

// Of a job that does not run. `config.batch` must be complete for that many ranks. `free`: on a
// device and, for a rank, on its host, where placement is automatic. Errors: of
// forecast::traits_of_job(), and those above.
forecast::MemoryForecast forecast_job(const ModelInput& input, const engine::Config& config,
                                      engine::UpdateRule rule, const forecast::Job& job,
                                      const forecast::FreeMemory& free);

}  // namespace strata::torch
