#include "strata/forecast/job_forecast.h"

#include <algorithm>
#include <map>

#include "strata/engine/step_control.h"

namespace strata::forecast {
namespace {

// fp32 if there are no parameters.
DType most_common_dtype(std::span<const plan::ParamSpec> params) {
  std::map<DType, Numel> elements;
  for (const plan::ParamSpec& param : params) elements[param.dtype] += param.numel();
  const auto most =
      std::ranges::max_element(elements, {}, [](const auto& entry) { return entry.second; });
  return most == elements.end() ? DType::kFloat32 : most->first;
}

void add_tier(offload::StatePlacement& place, std::optional<memory::Tier> tier) {
  if (tier && !place.uses(*tier)) place.others.push_back(*tier);
}

}  // namespace

engine::EngineOptions engine_options_of(std::span<const plan::ParamSpec> params,
                                        const engine::Config& config) {
  engine::EngineOptions options = engine::engine_options_from(config, most_common_dtype(params));
  if (!config.offload.automatic) return options;
  for (const plan::ParamSpec& param : params) {
    add_tier(options.weights, param.place.weights);
    add_tier(options.states, param.place.states);
  }
  return options;
}

Trainers trainers_of(const engine::Config& config, engine::UpdateRule rule, const Job& job) {
  return {rule, traits_of_job(config, job), job.on_gpus};
}

MemoryForecast forecast_training(std::span<const plan::ParamSpec> params,
                                 const plan::ModelPlan& plan, const plan::ModuleTree& tree,
                                 const engine::Config& config, const Trainers& trainers) {
  Training training;
  training.options = engine_options_of(params, config);
  training.rule = trainers.rule;
  training.micro_steps = static_cast<int>(config.batch.accumulation_steps.value_or(1));
  training.runs_ahead = trainers.runs_ahead;
  training.saves_beside = config.async_checkpoints;
  return forecast_memory(params, plan, tree, training, trainers.traits);
}

}  // namespace strata::forecast
