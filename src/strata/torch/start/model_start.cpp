#include "strata/torch/start/model_start.h"

#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/memory/system_memory.h"
#include "strata/plan/param_spec.h"
#include "strata/torch/base/host_threads.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/start/adoption.h"
#include "strata/torch/start/init_choice.h"

namespace strata::torch {
namespace {

// A parameter without values yet is on the meta device, or of the shape [0].
bool is_permuted(const ModelParameter& parameter, const plan::ParamSpec& spec) {
  if (spec.channels_last) return false;  // it keeps its format
  const at::Tensor& tensor = parameter.variable;
  return tensor.layout() == at::kStrided && tensor.sizes() == at::IntArrayRef(parameter.shape) &&
         !tensor.is_contiguous() && tensor.is_non_overlapping_and_dense();
}

std::optional<at::MemoryFormat> channels_last_format(const at::Tensor& tensor) {
  for (const at::MemoryFormat format :
       {at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d}) {
    const bool fits = tensor.dim() == (format == at::MemoryFormat::ChannelsLast ? 4 : 5);
    if (fits && tensor.is_contiguous(format)) return format;
  }
  return std::nullopt;
}

std::string name_of_format(at::MemoryFormat format) {
  return format == at::MemoryFormat::ChannelsLast ? "channels_last" : "channels_last_3d";
}

// A warning that names the first parameter whose strides are permuted (channels_last, say), counts
// the others, and says what that costs; empty where all are contiguous. `specs`: of the parameters.
std::string lost_memory_formats(std::span<const ModelParameter> parameters,
                                std::span<const plan::ParamSpec> specs) {
  const ModelParameter* first = nullptr;
  std::optional<at::MemoryFormat> format;  // the first of convolutions'
  std::size_t count = 0;
  Bytes copied;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!is_permuted(parameters[i], specs[i])) continue;
    const auto found = channels_last_format(parameters[i].variable);
    ++count;
    if (first == nullptr || (found && !format)) first = &parameters[i];
    if (!found) continue;
    if (!format) format = found;
    copied += bytes_of(specs[i].numel(), specs[i].dtype);
  }
  if (first == nullptr) return "";
  const std::string others =
      count == 1 ? "" : fmt::format(", as do {} other parameters", count - 1);
  const std::string text = fmt::format(
      "parameter '{}' has permuted strides ({}){}; the engine keeps the values, but lays all "
      "parameters out contiguous",
      first->name, fmt::join(first->variable.strides(), ", "), others);
  if (!format) return text;
  return text + fmt::format(
                    ". Convolutions run {0} kernels where their input is {0}, so convert the "
                    "input: x.to(memory_format=torch.{0}). torch then copies each such weight at "
                    "each use, in forward and in backward; these weights have {1} together",
                    name_of_format(*format), to_string(copied));
}

// Threads that take the values of a live model in.
int intake_threads(const ModelInput& input, const engine::Config& config,
                   const ModelRuntime& runtime) {
  bool any = false;
  bool on_host = false;
  for (const ModelParameter& parameter : input.parameters) {
    any = any || parameter.has_own_values();
    on_host = on_host || (parameter.has_own_values() && parameter.variable.is_cpu());
  }
  const comm::Collectives& collectives = *runtime.collectives;
  if (on_host && collectives.world_size() > 1 && collectives.rank() == 0)
    return reference_threads(config.strata.threads, collectives.world_size());
  return any ? runtime.threads : 1;
}

bool comes_from_files(const ModelInput& input) {
  return std::ranges::none_of(input.parameters, &ModelParameter::has_values);
}

// Compares the ranks' models and settings, before the first collective question.
void compare_ranks(const ModelInput& input, const PlannedModel& model, const engine::Config& config,
                   comm::Collectives& collectives) {
  if (collectives.world_size() == 1) return;
  engine::agree_on_text(collectives, "configuration", config.digest());
  engine::agree_on_text(
      collectives, "model",
      plan::describe(model.specs, model.plan) + describe_values(input.parameters));
}

bool uses_drives(const engine::EngineOptions& options) {
  return options.states.uses(memory::Tier::kNvme) || options.weights.uses(memory::Tier::kNvme);
}

// The warning about a budget that is raised because one part would have to wait for another.
std::string raised_budget(const offload::StatePlacement& place, const char* what) {
  if (place.budget <= place.asked) return "";
  return fmt::format(
      "{} on a drive are staged through {}, although buffer_count times buffer_size is {}: one "
      "part "
      "is read, one is worked on and one is written at once",
      what, to_string(place.budget), to_string(place.asked));
}

class ModelStart {
 public:
  ModelStart(const ModelInput& input, const PlannedModel& model, const engine::Config& config,
             const ModelRuntime& runtime, ParameterSet& parameters)
      : input_(input),
        model_(model),
        config_(config),
        runtime_(runtime),
        parameters_(parameters),
        originals_(input.parameters, model.specs) {}

  StartedModel run(StartOptions options);

 private:
  void warn(const std::string& told) const;
  engine::Stores make_stores(const engine::EngineOptions& options);
  void require_room(const engine::EngineOptions& options) const;
  void make_engine(StartOptions options, const plan::InitChoice& choice);
  void bring_values(const plan::InitChoice& choice);
  void undo() noexcept;

  const ModelInput& input_;
  const PlannedModel& model_;
  const engine::Config& config_;
  const ModelRuntime& runtime_;
  ParameterSet& parameters_;
  OriginalValues originals_;
  StartedModel started_;
};

void ModelStart::warn(const std::string& told) const {
  if (told.empty() || runtime_.collectives->rank() != 0) return;
  if (runtime_.warn) {
    runtime_.warn(told);
  } else {
    TORCH_WARN(told);
  }
}

// Makes the stores. A path may be unusable on one rank only, so all ranks learn of an error.
engine::Stores ModelStart::make_stores(const engine::EngineOptions& options) {
  if (runtime_.states != nullptr) return {runtime_.states, runtime_.states};
  comm::Collectives& collectives = *runtime_.collectives;
  offload::MadeStores made;
  const auto make = [&] {
    made =
        offload::make_stores(options.states, options.weights, *runtime_.device, collectives.rank());
  };
  if (!uses_drives(options)) {
    make();
    return {std::move(made.states), std::move(made.weights)};
  }
  engine::agree_after(collectives, "making room on drives", make);
  for (const std::string& told :
       {made.warning, raised_budget(options.states, "the optimizer's states"),
        raised_budget(options.weights, "the weights")}) {
    warn(told);
  }
  return {std::move(made.states), std::move(made.weights)};
}

void ModelStart::require_room(const engine::EngineOptions& options) const {
  if (!uses_drives(options)) return;
  comm::Collectives& collectives = *runtime_.collectives;
  engine::agree_after(collectives, "looking for staging memory", [&] {
    require_staging_room(options, ranks_of_host(collectives.world_size()),
                         memory::available_memory());
  });
}

void ModelStart::make_engine(StartOptions options, const plan::InitChoice& choice) {
  engine::EngineOptions engine_options = engine_options_of(model_, config_);
  engine_options.name = std::move(options.name);
  engine::cap_staging(engine_options, model_.specs, model_.plan, options.rule,
                      runtime_.collectives->shard_position().count);
  require_room(engine_options);
  started_.engine = std::make_unique<engine::Engine>(
      model_.specs, model_.plan, engine_options, options.rule, config_.digest(),
      runtime_.collectives, runtime_.device, make_stores(engine_options), parameters_);
  engine::InitReport& report = started_.engine->init_report();
  report.progress = std::move(options.progress);
  report.tier = name_of(choice.tier);
  report.reason = choice.reason;
}

void ModelStart::bring_values(const plan::InitChoice& choice) {
  engine::Engine& engine = *started_.engine;
  ThreadPool threads(intake_threads(input_, config_, runtime_));
  if (comes_from_files(input_)) engine.prepare();  // no old values must be freed first
  const bool complete = adopt_values(engine, runtime_.place, input_.parameters, choice.tier,
                                     threads, originals_, config_.zero.partition_stream_chunk);
  parameters_.bind(engine.weights());
  started_.passes = std::make_unique<TrainingPasses>(engine, parameters_, model_, config_);
  parameters_.settle();
  engine.weights_changed(complete);
  engine.prepare();
}

// Drops its own errors: the caller gets the error that ended the start.
void ModelStart::undo() noexcept {
  FirstError untold;
  started_.passes.reset();
  started_.engine.reset();
  untold.attempt([this] { parameters_.unbind(); });
  untold.attempt([this] { release_cached_memory(runtime_.place); });
  originals_.restore();
}

StartedModel ModelStart::run(StartOptions options) {
  try {
    warn(lost_memory_formats(input_.parameters, model_.specs));  // while they have them
    const plan::InitChoice choice = choose_init(input_, model_, config_, options.rule,
                                                runtime_);  // before anything is moved
    make_engine(std::move(options), choice);
    bring_values(choice);
  } catch (const OutOfMemoryError& error) {
    undo();
    if (originals_.given_up() == 0) throw;
    throw OutOfMemoryError(
        fmt::format("{}. The memory of {} of {} parameters had been given up for the engine's by "
                    "then: build the model again",
                    error.what(), originals_.given_up(), originals_.size()));
  } catch (...) {
    undo();
    throw;
  }
  started_.replaced = originals_.release();
  release_cached_memory(runtime_.place);  // so that nothing is mapped while much is unmapped
  return std::move(started_);
}

}  // namespace

StartedModel start_model(const ModelInput& input, const PlannedModel& model,
                         const engine::Config& config, const ModelRuntime& runtime,
                         ParameterSet& parameters, StartOptions options) {
  compare_ranks(input, model, config, *runtime.collectives);
  return ModelStart(input, model, config, runtime, parameters).run(std::move(options));
}

}  // namespace strata::torch
