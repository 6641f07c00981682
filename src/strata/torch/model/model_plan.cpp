#include "strata/torch/model/model_plan.h"

#include "strata/base/error.h"
#include "strata/engine/config/offload_config.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/base/tensors.h"

namespace strata::torch {
namespace {

// A parameter that another model has sharded keeps the format that it has there.
bool keeps_channels_last(const ModelParameter& parameter) {
  if (parameter.tile) return false;
  if (parameter.owner != nullptr) return parameter.owner->channels_last(parameter.owner_index);
  return parameter.has_values && parameter.variable.sizes() == at::IntArrayRef(parameter.shape) &&
         is_channels_last(parameter.variable);
}

std::vector<plan::ParamSpec> param_specs(const ModelInput& input, const engine::Config& config,
                                         plan::UpdateRule rule) {
  std::vector<plan::ParamSpec> specs;
  for (const ModelParameter& parameter : input.parameters) {
    plan::ParamSpec spec;
    spec.name = parameter.name;
    spec.shape = parameter.shape;
    spec.tile = parameter.tile;
    spec.dtype = config.precision.weight_dtype(from_scalar_type(parameter.variable.scalar_type()));
    spec.trainable = parameter.variable.requires_grad() && parameter.group >= 0;
    if (spec.trainable && !is_floating(spec.dtype))
      throw ConfigError(
          "a trainable parameter is of float32, bfloat16, float16 or float64; freeze '{}' "
          "(requires_grad=False), or convert it before initialize(); it is of {}",
          spec.name, name_of(spec.dtype));
    spec.group = parameter.group;
    spec.rule = parameter.rule;
    spec.matrices_apart = parameter.matrices_apart;
    spec.matrix_cost = parameter.matrix_cost;
    spec.channels_last = keeps_channels_last(parameter);
    specs.push_back(std::move(spec));
  }
  if (config.strata.states_8bit && plan::is_native(rule))
    plan::take_8_bits(specs, input.tree, config.strata.min_8bit_size);
  for (std::size_t i = 0; i < specs.size(); ++i)
    specs[i].states = input.parameters[i].states.value_or(specs[i].states);
  engine::place_params(specs, config.offload);
  return specs;
}

}  // namespace

PlannedModel plan_model(const ModelInput& input, const engine::Config& config,
                        const forecast::Trainers& trainers, const forecast::Room& room) {
  std::vector<plan::ParamSpec> specs = param_specs(input, config, trainers.rule);
  forecast::place_automatically(specs, input.tree, config, trainers, room);
  plan::ModelPlan plan = plan::plan_units(specs, input.tree, engine::plan_options_from(config));
  return {std::move(specs), std::move(plan), input.tree};
}

ModelRuntime make_runtime(c10::Device place, int threads,
                          std::shared_ptr<comm::Collectives> collectives) {
  std::shared_ptr<device::Device> device = make_device(place, threads);
  return {place, std::move(collectives), std::move(device), nullptr, {}, threads};
}

}  // namespace strata::torch
