#include "strata/torch/start/model_start.h"

#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <span>
#include <sstream>
#include <utility>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/memory/host_buffer.h"
#include "strata/plan/param_spec.h"
#include "strata/torch/base/placement.h"
#include "strata/torch/start/adoption.h"

namespace strata::torch {
namespace {

bool can_grow(device::Device& device) {
  try {
    device.reserve(Bytes(1), memory::Kind::kWeights);
    return true;
  } catch (const DeviceError&) {
    return false;
  }
}

// The bytes of values that lie on `place`, or elsewhere.
Bytes values_at(const ModelInput& input, c10::Device place, bool there) {
  Bytes bytes;
  for (const ModelParameter& parameter : input.parameters) {
    if (parameter.has_own_values() && (parameter.variable.device() == place) == there)
      bytes += Bytes(static_cast<std::int64_t>(parameter.variable.nbytes()));
  }
  return bytes;
}

// This rank's part of what is available on its host.
Bytes host_memory_of(const ModelRuntime& runtime) {
  return memory::available_memory() / ranks_of_host(runtime.collectives->world_size());
}

plan::InitFacts facts_of(const ModelInput& input, const ModelRuntime& runtime) {
  release_cached_memory(runtime.place);
  plan::InitFacts facts;
  facts.device_free = runtime.device->free_bytes();
  facts.host_free = host_memory_of(runtime);
  // Ranks on the host share its free memory; each GPU belongs to one rank.
  if (runtime.place.is_cpu()) facts.device_free = std::min(facts.device_free, facts.host_free);
  facts.can_grow = can_grow(*runtime.device);
  facts.device_values = values_at(input, runtime.place, true);
  facts.host_values = values_at(input, runtime.place, false);
  return facts;
}

std::string text_of(const plan::InitFacts& facts) {
  return fmt::format("{} {} {} {} {}", facts.device_free.value, facts.host_free.value,
                     facts.device_values.value, facts.host_values.value, facts.can_grow ? 1 : 0);
}

plan::InitFacts facts_from(const std::string& text) {
  plan::InitFacts facts;
  std::istringstream stream(text);
  stream >> facts.device_free.value >> facts.host_free.value >> facts.device_values.value >>
      facts.host_values.value >> facts.can_grow;
  STRATA_ASSERT(!stream.fail());
  return facts;
}

plan::OptimizerNeeds needs_of(engine::UpdateRule rule, const engine::EngineOptions& options) {
  plan::OptimizerNeeds needs;
  needs.masters = engine::masters_for(rule, options);
  needs.state_dtype = options.moment_dtype;
  needs.states_tier = options.states.tier;
  needs.weights_tier = options.weights.tier;
  needs.rule = rule;
  return needs;
}

// A parameter without values yet is on the meta device, or of the shape [0].
bool is_permuted(const ModelParameter& parameter, const plan::ParamSpec& spec) {
  if (spec.channels_last) return false;  // it keeps its format
  const at::Tensor& tensor = parameter.variable;
  return tensor.layout() == at::kStrided && tensor.sizes() == at::IntArrayRef(parameter.shape) &&
         !tensor.is_contiguous() && tensor.is_non_overlapping_and_dense();
}

// The format of a convolution's weight; empty: it has none.
std::string_view channels_last_format(const at::Tensor& tensor) {
  if (tensor.dim() == 4 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast))
    return "channels_last";
  if (tensor.dim() == 5 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d))
    return "channels_last_3d";
  return "";
}

// A warning that names the first parameter whose strides are permuted (channels_last, say), counts
// the others, and says what that costs; empty where all are contiguous. `specs`: of the parameters.
std::string lost_memory_formats(std::span<const ModelParameter> parameters,
                                std::span<const plan::ParamSpec> specs) {
  const ModelParameter* first = nullptr;
  std::string_view format;  // the first of convolutions'
  std::size_t count = 0;
  Bytes copied;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!is_permuted(parameters[i], specs[i])) continue;
    const std::string_view found = channels_last_format(parameters[i].variable);
    ++count;
    if (first == nullptr || (!found.empty() && format.empty())) first = &parameters[i];
    if (found.empty()) continue;
    if (format.empty()) format = found;
    copied += bytes_of(specs[i].numel(), specs[i].dtype);
  }
  if (first == nullptr) return "";
  const std::string others =
      count == 1 ? "" : fmt::format(", as do {} other parameters", count - 1);
  const std::string text = fmt::format(
      "parameter '{}' has permuted strides ({}){}; the engine keeps the values, but lays all "
      "parameters out contiguous",
      first->name, fmt::join(first->variable.strides(), ", "), others);
  if (format.empty()) return text;
  return text + fmt::format(
                    ". Convolutions run {0} kernels where their input is {0}, so convert the "
                    "input: x.to(memory_format=torch.{0}). torch then copies each such weight at "
                    "each use, in forward and in backward; these weights have {1} together",
                    format, to_string(copied));
}

// Threads that take the values of a live model in.
int intake_threads(const ModelInput& input, const engine::Config& config,
                   const ModelRuntime& runtime) {
  const bool any = std::ranges::any_of(input.parameters, &ModelParameter::has_own_values);
  const bool on_host = std::ranges::any_of(input.parameters, [](const ModelParameter& parameter) {
    return parameter.has_own_values() && parameter.variable.is_cpu();
  });
  const comm::Collectives& collectives = *runtime.collectives;
  if (on_host && collectives.world_size() > 1 && collectives.rank() == 0)
    return reference_threads(config.strata.threads, collectives.world_size());
  return any ? runtime.threads : 1;
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
      "part is read, one is worked on and one is written at once",
      what, to_string(place.budget), to_string(place.asked));
}

// Calls plan::choose_init for a torch model, with the places of its values and the free memory of
// every rank. Collective; returns the same choice on every rank. Moves nothing, but returns unused
// memory of torch's allocator to the system.
plan::InitChoice choose_init(const ModelInput& input, const PlannedModel& model,
                             const engine::Config& config, engine::UpdateRule rule,
                             const ModelRuntime& runtime) {
  const int world = runtime.collectives->world_size();
  const comm::ShardPosition place = runtime.collectives->shard_position();
  const int shards = place.count;
  std::vector<plan::InitFacts> by_rank;
  for (const std::string& text :
       runtime.collectives->all_gather_text(text_of(facts_of(input, runtime)))) {
    by_rank.push_back(facts_from(text));
  }
  const int stage = config.zero.stage;
  const plan::OptimizerNeeds needs =
      needs_of(rule, forecast::engine_options_of(model.specs, config));
  const auto demand = [&](int with_stage, int ranks) {
    return plan::init_demand(model.specs, model.plan, with_stage, ranks, needs);
  };
  std::vector<plan::InitAlternative> alternatives;
  if (stage < 3 && shards > 1) alternatives.push_back({"stage 3", demand(3, shards).total()});
  for (const int more : {2, 4, 8, 16}) {
    const int wanted = shards * more;
    alternatives.push_back({shards < world && wanted <= world
                                ? fmt::format("groups of {} ranks (mics_shard_size)", wanted)
                                : fmt::format("{} ranks at stage 3", wanted),
                            demand(3, wanted).total()});
  }
  return plan::choose_init(
      plan::init_demand(model.specs, model.plan, stage, shards, needs, place.parts), by_rank,
      config.strata.init_tier, alternatives);
}

// Throws OutOfMemoryError if the ranks of a host together need more than the host has for staging,
// before any is taken, for drive-resident states or weights.
void require_staging_room(const engine::EngineOptions& options, int ranks_of_host) {
  const Bytes available = memory::available_memory() / ranks_of_host;
  Bytes wanted;
  std::string parts;
  const auto add = [&](const offload::StatePlacement& place, std::string_view section) {
    if (!place.uses(memory::Tier::kNvme)) return;
    wanted += place.budget;
    parts += fmt::format("{}{} of offload_{}", parts.empty() ? "" : ", ", to_string(place.budget),
                         section);
  };
  add(options.states, "optimizer");
  add(options.weights, "param");
  if (wanted <= available) return;
  throw OutOfMemoryError(
      "the host has less memory than what drives are to be staged through (buffer_count times "
      "buffer_size, and max_in_cpu); lower one of them: some megabytes suffice. Wanted by each of "
      "{} ranks of this host: {} ({}); available for each: {}",
      ranks_of_host, to_string(wanted), parts, to_string(available));
}

void warn(const ModelRuntime& runtime, const std::string& told) {
  if (told.empty() || runtime.collectives->rank() != 0) return;
  if (runtime.warn)
    runtime.warn(told);
  else
    TORCH_WARN(told);
}

// Makes the stores. A path may be unusable on one rank only, so all ranks learn of an error.
engine::Stores make_stores(const engine::EngineOptions& options, const ModelRuntime& runtime) {
  if (runtime.states != nullptr) return {runtime.states, runtime.states};
  comm::Collectives& collectives = *runtime.collectives;
  offload::MadeStores made;
  const auto make = [&] {
    made =
        offload::make_stores(options.states, options.weights, *runtime.device, collectives.rank());
  };
  if (!uses_drives(options)) {
    make();
    return {std::move(made.states), std::move(made.weights)};
  }
  engine::agree_after(collectives, "making room on drives", make);
  for (const std::string& told :
       {made.warning, raised_budget(options.states, "the optimizer's states"),
        raised_budget(options.weights, "the weights")}) {
    warn(runtime, told);
  }
  return {std::move(made.states), std::move(made.weights)};
}

std::unique_ptr<engine::Engine> make_engine(const PlannedModel& model, const engine::Config& config,
                                            const ModelRuntime& runtime, ParameterSet& parameters,
                                            StartOptions start, const plan::InitChoice& choice) {
  comm::Collectives& collectives = *runtime.collectives;
  engine::EngineOptions options = forecast::engine_options_of(model.specs, config);
  // The memory's speed bounds them: of 16 cores six were the fastest beside the device's lane.
  options.lanes.threads = std::max(1, runtime.threads * 3 / 8);
  options.lanes.cores = host_cores(options.lanes.threads);
  // A graph that is being captured lets nothing be given back.
  constexpr Bytes kAll(std::numeric_limits<std::int64_t>::max());
  if (on_growth(runtime.place, [] { return false; }) != nullptr && !config.strata.cuda_graphs)
    options.lanes.cache =
        config.strata.state_cache.value_or(config.offload.device_budget ? Bytes() : kAll);
  options.name = std::move(start.name);
  engine::cap_staging(options, model.specs, model.plan, start.rule,
                      collectives.shard_position().count);
  if (uses_drives(options)) {
    engine::agree_after(collectives, "looking for staging memory", [&] {
      require_staging_room(options, ranks_of_host(collectives.world_size()));
    });
  }
  const std::string settings = config.digest() + fmt::format("the optimizer's update rule = {}\n",
                                                             plan::traits_of(start.rule).name);
  auto engine = std::make_unique<engine::Engine>(model.specs, model.plan, options, start.rule,
                                                 settings, runtime.collectives, runtime.device,
                                                 make_stores(options, runtime), parameters);
  engine::InitReport& report = engine->init_report();
  report.progress = std::move(start.progress);
  report.tier = name_of(choice.tier);
  report.reason = choice.reason;
  return engine;
}

}  // namespace

forecast::Room agreed_room(const ModelInput& input, const engine::Config& config,
                           const ModelRuntime& runtime) {
  if (!config.offload.automatic) return {};
  comm::Collectives& collectives = *runtime.collectives;
  engine::agree_on_text(collectives, "configuration", config.digest());
  release_cached_memory(runtime.place);
  const Bytes device = runtime.device->free_bytes() + values_at(input, runtime.place, true);
  double least[] = {static_cast<double>(device.value),
                    static_cast<double>(host_memory_of(runtime).value)};
  collectives.all_reduce(least, comm::ReduceOp::kMin);
  const forecast::FreeMemory free{Bytes(static_cast<std::int64_t>(least[0])),
                                  Bytes(static_cast<std::int64_t>(least[1])),
                                  runtime.place.is_cpu()};
  return forecast::room_for(config.offload, free);
}

StartedModel start_model(const ModelInput& input, const PlannedModel& model,
                         const engine::Config& config, const ModelRuntime& runtime,
                         ParameterSet& parameters, StartOptions options) {
  compare_ranks(input, model, config, *runtime.collectives);
  OriginalValues originals(input.parameters, model.specs);
  StartedModel started;
  const auto undo = [&]() noexcept {
    FirstError untold;  // dropped: the caller gets the error that ended the start
    started.passes.reset();
    started.on_growth.reset();
    started.engine.reset();
    untold.attempt([&] { parameters.unbind(); });
    untold.attempt([&] { release_cached_memory(runtime.place); });
    originals.restore();
  };
  try {
    warn(runtime, lost_memory_formats(input.parameters, model.specs));  // while they have them
    const plan::InitChoice choice =
        choose_init(input, model, config, options.rule, runtime);  // before anything is moved
    started.engine = make_engine(model, config, runtime, parameters, std::move(options), choice);
    engine::Engine& engine = *started.engine;
    started.on_growth = on_growth(runtime.place, [&engine] { return engine.give_back_memory(); });
    ThreadPool threads(intake_threads(input, config, runtime));
    if (std::ranges::none_of(input.parameters, &ModelParameter::has_values))
      engine.prepare();  // values come from files: no old ones must be freed first
    const bool complete = adopt_values(engine, runtime.place, input.parameters, choice.tier,
                                       threads, originals, config.zero.partition_stream_chunk);
    parameters.bind(engine.weights());
    started.passes = std::make_unique<TrainingPasses>(engine, parameters, model, config);
    parameters.settle();
    engine.weights_changed(complete);
    engine.prepare();
  } catch (const OutOfMemoryError& error) {
    undo();
    if (originals.given_up() == 0) throw;
    throw OutOfMemoryError(
        "{}. The memory of {} of {} parameters had been given up for the engine's by then: build "
        "the model again",
        error.what(), originals.given_up(), originals.size());
  } catch (...) {
    undo();
    throw;
  }
  started.replaced = originals.release();
  release_cached_memory(runtime.place);  // so that nothing is mapped while much is unmapped
  return started;
}

}  // namespace strata::torch
