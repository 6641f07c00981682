#include "strata/torch/model/model_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/step_control.h"
#include "strata/torch/base/dtype.h"

namespace strata::torch {
namespace {

plan::PlanOptions plan_options(const engine::Config& config) {
  plan::PlanOptions options;
  options.wrap = config.strata.wrap;
  options.leaves = {config.zero.leaf.classes, config.zero.leaf.names,
                    config.zero.leaf.name_suffixes};
  if (config.strata.unit_size) {
    options.unit_bytes = *config.strata.unit_size;
    options.block_unit_bytes = *config.strata.unit_size;
  }
  if (config.zero.stage == 3) {
    options.one_by_one = config.zero.allgather_sequential;
    if (config.strata.unit_size) {
      options.small_bytes = std::min(options.small_bytes, *config.strata.unit_size);
    }
    options.persistence_threshold = config.zero.param_persistence_threshold;
    options.persistence_total = config.zero.model_persistence_threshold;
    // strata.max_live_bytes leaves the units as they are: strata.unit_size is there beside it.
    if (!config.strata.max_live) options.shared_numel = config.zero.max_live_parameters;
  }
  return options;
}

std::vector<plan::ParamSpec> param_specs(const ModelInput& input, const engine::Config& config) {
  std::vector<plan::ParamSpec> specs;
  for (const ModelParameter& parameter : input.parameters) {
    plan::ParamSpec spec;
    spec.name = parameter.name;
    spec.shape = parameter.shape;
    spec.dtype = config.precision.weight_dtype(from_scalar_type(parameter.variable.scalar_type()));
    spec.trainable = parameter.variable.requires_grad() && parameter.group >= 0;
    if (spec.trainable && !is_floating(spec.dtype)) {
      throw ConfigError(fmt::format(
          "a trainable parameter is of float32, bfloat16, float16 or float64; freeze '{}' "
          "(requires_grad=False), or convert it before initialize(); it is of {}",
          spec.name, name_of(spec.dtype)));
    }
    spec.group = std::max(parameter.group, 0);
    specs.push_back(std::move(spec));
  }
  return specs;
}

// Of fp32 where there are no parameters.
DType most_common_dtype(std::span<const plan::ParamSpec> specs) {
  std::map<DType, Numel> elements;
  for (const plan::ParamSpec& spec : specs) elements[spec.dtype] += spec.numel();
  const auto most =
      std::ranges::max_element(elements, {}, [](const auto& entry) { return entry.second; });
  return most == elements.end() ? DType::kFloat32 : most->first;
}

}  // namespace

engine::EngineOptions engine_options_of(const PlannedModel& model, const engine::Config& config) {
  return engine::engine_options_from(config, most_common_dtype(model.specs));
}

PlannedModel plan_model(const ModelInput& input, const engine::Config& config) {
  std::vector<plan::ParamSpec> specs = param_specs(input, config);
  plan::ModelPlan plan = plan::plan_units(specs, input.tree, plan_options(config));
  return {std::move(specs), std::move(plan), input.tree};
}

forecast::MemoryForecast forecast_job(const ModelInput& input, const engine::Config& config,
                                      engine::UpdateRule rule, const forecast::Job& job) {
  const PlannedModel model = plan_model(input, config);
  forecast::Training training;
  training.options = engine_options_of(model, config);
  training.rule = rule;
  training.micro_steps = static_cast<int>(config.batch.accumulation_steps.value_or(1));
  training.runs_ahead = job.on_gpus;
  return forecast::forecast_memory(model.specs, model.plan, model.tree, training,
                                   forecast::traits_of_job(config, job));
}

}  // namespace strata::torch
