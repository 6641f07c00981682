// Forecasts the memory of each device of a job that does not run, from a configuration and a
// model's names and shapes. Pure functions.
#pragma once

#include <span>

#include "strata/engine/config/config.h"
#include "strata/forecast/job_traits.h"
#include "strata/forecast/memory_forecast.h"

namespace strata::forecast {

// The facts about a training job that its configuration does not hold.
struct Trainers {
  engine::UpdateRule rule = engine::UpdateRule::kAdamW;
  comm::Traits traits;      // of the ranks' collectives
  bool runs_ahead = false;  // the device: GPUs do
};

// The same for a job that does not run. Errors: those of traits_of_job().
Trainers trainers_of(const engine::Config& config, engine::UpdateRule rule, const Job& job);

// The options of an engine for these parameters. If parameters keep their dtypes, numbers of
// elements in the configuration become bytes by the dtype that most elements have. The stores are
// those of the tiers that the configuration names, and, if placement is automatic, of the tiers of
// the parameters.
engine::EngineOptions engine_options_of(std::span<const plan::ParamSpec> params,
                                        const engine::Config& config);

// `params` in the dtype that they compute in; `plan` was made from them and the tree.
// `config.batch` says the accumulation steps, one where it does not. Errors: of forecast_memory().
MemoryForecast forecast_training(std::span<const plan::ParamSpec> params,
                                 const plan::ModelPlan& plan, const plan::ModuleTree& tree,
                                 const engine::Config& config, const Trainers& trainers);

}  // namespace strata::forecast
