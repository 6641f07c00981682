// What each device of a job that does not run would hold, from a configuration and a model's names
// and shapes. Pure functions.
#pragma once

#include <span>

#include "strata/engine/config/config.h"
#include "strata/forecast/job_traits.h"
#include "strata/forecast/memory_forecast.h"

namespace strata::forecast {

// Who trains a model, beside what its configuration says.
struct Trainers {
  engine::UpdateRule rule = engine::UpdateRule::kAdamW;
  comm::Traits traits;      // of the ranks' collectives
  bool runs_ahead = false;  // the device: GPUs do
};

// Of a job that does not run. Errors: of traits_of_job().
Trainers trainers_of(const engine::Config& config, engine::UpdateRule rule, const Job& job);

// Of an engine for these parameters. Where they keep their dtypes, numbers of elements in the
// configuration become bytes with the width of the one that most elements have. Stores are of the
// tiers that the configuration names, and, where placement is automatic, those that parameters do.
engine::EngineOptions engine_options_of(std::span<const plan::ParamSpec> params,
                                        const engine::Config& config);

// `params` in the dtype that they compute in; `plan` was made from them and the tree.
// `config.batch` says the accumulation steps, one where it does not. Errors: of forecast_memory().
MemoryForecast forecast_training(std::span<const plan::ParamSpec> params,
                                 const plan::ModelPlan& plan, const plan::ModuleTree& tree,
                                 const engine::Config& config, const Trainers& trainers);

}  // namespace strata::forecast
