#include "strata/torch/trainer.h"

#include <exception>
#include <unordered_map>
#include <utility>

#include "strata/base/error.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/cpp/module_checkpoint.h"
#include "strata/torch/rank_environment.h"

namespace strata::torch {
namespace {

using GroupOfParameter = std::unordered_map<const c10::TensorImpl*, int>;

engine::UpdateRule rule_of(const engine::Config& config, bool has_groups) {
  if (!config.optimizer) return has_groups ? engine::UpdateRule::kAdamW : engine::UpdateRule::kNone;
  if (config.optimizer->kind != engine::OptimizerKind::kAdam)
    throw ConfigError(
        "optimizer.type: optimizers of torch.optim need Python; a C++ program has \"Adam\" and "
        "\"AdamW\". Write one of these; found \"{}\"",
        config.optimizer->type);
  return config.optimizer->adam.decoupled ? engine::UpdateRule::kAdamW : engine::UpdateRule::kAdam;
}

GroupOfParameter index_groups(const std::vector<ParamGroup>& groups) {
  GroupOfParameter result;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& parameter : groups[g].parameters) {
      const auto [place, is_new] =
          result.emplace(parameter.unsafeGetTensorImpl(), static_cast<int>(g));
      if (is_new) continue;
      throw UsageError(
          "a parameter may be in one param group, once; found one of shape {} in groups {} and {}",
          c10::str(parameter.sizes()), place->second, g);
    }
  }
  return result;
}

void require_grouped(const ModelInput& input, const GroupOfParameter& groups) {
  for (const ModelParameter& parameter : input.parameters) {
    if (!parameter.variable.requires_grad() ||
        groups.contains(parameter.variable.unsafeGetTensorImpl()))
      continue;
    throw UsageError(
        "a trainable parameter is in no param group; call set_requires_grad(false) on it or add it "
        "to one: '{}'",
        parameter.name);
  }
}

// A C++ program moves its module itself.
c10::Device place_of(const ModelInput& input, engine::DeviceKind wanted) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  for (const ModelParameter& parameter : input.parameters)
    parameters.emplace_back(parameter.name, parameter.variable);
  const c10::Device place = device_of(parameters).value_or(c10::Device(c10::DeviceType::CPU));
  const auto found = place.is_cuda() ? engine::DeviceKind::kCuda : engine::DeviceKind::kCpu;
  if (wanted == engine::DeviceKind::kAuto || wanted == found) return place;
  throw ConfigError(
      "strata.device: the module must be where the configuration says; move it with "
      "module->to(device), or write \"auto\"; wanted \"{}\", found it on {}",
      wanted == engine::DeviceKind::kCuda ? "cuda" : "cpu", place.str());
}

}  // namespace

Trainer::Trainer(std::shared_ptr<::torch::nn::Module> module, TrainerOptions options)
    : module_(std::move(module)),
      collectives_(std::move(options.collectives)),
      exceptions_(std::uncaught_exceptions()) {
  if (module_ == nullptr)
    throw UsageError("a trainer needs a module; found null. Pass model.ptr()");
  engine::Config config = engine::Config::parse(options.config);
  config.require_for_training(!options.groups.empty(), false);
  const engine::UpdateRule rule = rule_of(config, !options.groups.empty());
  const GroupOfParameter group_of = index_groups(options.groups);
  const ModuleDescription description = describe_module(*module_, group_of);
  const c10::Device place = place_of(description.input, config.strata.device);
  if (collectives_ == nullptr)
    collectives_ = make_collectives(RankEnvironment::read(), config, place);
  if (config.sequence_parallel > 1)
    throw ConfigError(
        "strata.sequence_parallel.size: exchanges the attention of transformers' models in Python; "
        "a C++ trainer has none, so remove the key; found {}",
        config.sequence_parallel);
  config.complete_batch(collectives_->world_size());
  if (!options.groups.empty()) require_grouped(description.input, group_of);
  for (const ParamGroup& group : options.groups) groups_.push_back(group.scalars);
  if (groups_.empty() && config.optimizer) groups_.push_back(config.optimizer->adam);

  const int threads = host_threads(config.strata.threads, collectives_->world_size());
  model_ = std::make_shared<ShardedModel>(description.input, config, rule,
                                          make_runtime(place, threads, collectives_), "engine");
  scopes_ = std::make_shared<ModuleScopes>(model_, description);
  model_->free_originals();
  make_scheduler();
}

Trainer::~Trainer() {
  if (!model_->alive() || std::uncaught_exceptions() > exceptions_) return;
  try {
    close();
  } catch (const std::exception&) {
    // Another rank failed; it reports the error itself.
  }
}

void Trainer::make_scheduler() {
  const engine::Config& config = model_->config();
  if (config.torch_scheduler)
    throw ConfigError(
        "scheduler.type: schedulers of torch.optim.lr_scheduler need Python; a C++ program has "
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle and LRRangeTest. Write one of these; "
        "found \"{}\"",
        config.torch_scheduler->type);
  if (!config.scheduler || groups_.empty()) return;
  std::vector<double> lrs;
  for (const engine::GroupScalars& group : groups_) lrs.push_back(group.lr);
  scheduler_.emplace(engine::make_schedule(config.scheduler->params, {lrs, true}),
                     config.scheduler->last_iteration);
  if (const auto rates = scheduler_->initial()) write_rates(*rates);
}

void Trainer::write_rates(const engine::Rates& rates) {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    groups_[i].lr = rates.lrs.at(i);
    if (!rates.betas) continue;
    groups_[i].beta1 = rates.betas->at(i).beta1;
    groups_[i].beta2 = rates.betas->at(i).beta2;
  }
}

void Trainer::require_root(const ::torch::nn::Module& root) const {
  if (&root == module_.get()) return;
  throw UsageError(
      "forward() runs the module that the trainer was made with, a {}; found another {}. Call "
      "parts of it with call()",
      module_->name(), root.name());
}

void Trainer::backward(const at::Tensor& loss) {
  model_->begin_backward(groups_);
  try {
    model_->factored(loss, /*by_accumulation=*/true).backward();
    model_->end_backward();
  } catch (...) {
    model_->abandon_backward();
    throw;
  }
}

std::optional<engine::StepResult> Trainer::step() {
  if (model_->control().ends_step()) settle_schedule();
  const std::optional<engine::StepResult> result = model_->step(groups_);
  if (result && result->applied && scheduler_) {
    write_rates(scheduler_->step());
    schedule_is_ahead_ = !result->grad_norm.has_value();
  }
  return result;
}

void Trainer::settle_schedule() {
  if (std::exchange(schedule_is_ahead_, false) && !model_->control().last_step_applied())
    write_rates(scheduler_->step_to(scheduler_->last_iteration() - 1));
}

void Trainer::save(const std::string& folder) {
  save_module(*model_, *module_, folder);
}

void Trainer::load(const std::string& path) {
  load_module(*model_, *module_, path);
}

void Trainer::save_checkpoint(const std::string& folder, const std::string& tag) {
  settle_schedule();
  save_training_of(*model_, *module_, {groups_, scheduler_}, folder, tag);
}

std::optional<std::string> Trainer::load_checkpoint(const std::string& folder,
                                                    const std::string& tag) {
  settle_schedule();
  return load_training_of(*model_, *module_, {groups_, scheduler_}, folder, tag);
}

}  // namespace strata::torch
