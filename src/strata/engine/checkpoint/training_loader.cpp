#include "strata/engine/checkpoint/training_loader.h"

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>

#include "strata/base/error.h"
#include "strata/checkpoint/reader.h"
#include "strata/engine/checkpoint/shard_states.h"
#include "strata/engine/checkpoint/state_conversion.h"
#include "strata/engine/checkpoint/weight_loader.h"
#include "strata/engine/optimize/native_optimizer.h"
#include "strata/engine/unit/agreement.h"
#include "strata/format/safetensors.h"
#include "strata/io/pending_range.h"

namespace strata::engine {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LossScaler::State, scale, iteration, last_overflow,
                                   hysteresis_left)

namespace {

using format::kValue;
using format::Manifest;
using format::ManifestRange;
using format::TensorRole;

constexpr std::string_view kLoadingTraining = "loading the checkpoint";

// A state of a parameter to be stored.
struct Entry {
  std::string_view kind;                // of ShardStates, or
  const StateTarget* target = nullptr;  // not null: memory of another optimizer
  bool converts = false;                // it comes in another form: state_conversion.h
};

// The sources of a map: each of its parameters is the sum of a tensor's extents of one kind.
struct StateSources {
  std::vector<LoadedParam> loaded;  // by the map's parameter, as
  std::vector<Entry> entries;
  std::vector<format::ParamSources> params;
  std::vector<format::CheckpointTensor> tensors;
};

void add_entry(StateSources& all, const Weights& weights, int index, const Entry& entry,
               const TrainingCheckpoint& checkpoint, std::size_t tensor) {
  const Manifest& manifest = checkpoint.manifest();
  const plan::ParamSpec& param = weights.param(index);
  const std::int64_t each = format::elements_each(entry.kind);
  const Numel numbers = format::numel_of(entry.kind, param.numel());
  const auto shape = each == 1 ? param.shape : std::vector<std::int64_t>{numbers.value};
  format::ParamSources sources{
      fmt::format("{} {}", entry.kind, param.name), shape, DType::kFloat32, {}};
  const Numel first(param.known_first() / each);
  const std::vector<std::size_t>& extents = checkpoint.extents(tensor, entry.kind);
  if (extents.empty()) return;  // of a tensor without elements
  for (const std::size_t i : extents) {
    const ManifestRange& e = manifest.extents[i];
    // A tile takes the elements that lie in it.
    const Numel begin = std::max(e.begin, first);
    const Numel end = std::min(e.end, first + numbers);
    if (begin >= end) continue;
    const Numel numel = e.end - e.begin;
    const std::string name = fmt::format("{} {}", i, sources.name);
    sources.dtype = e.dtype;
    sources.pieces.push_back({name, {numel.value}, begin - first, begin - e.begin, end - begin});
    all.tensors.push_back(
        {e.file, {name, e.dtype, {numel.value}, numel, e.offset, bytes_of(numel, e.dtype)}});
  }
  const bool reordered = manifest.tensors[tensor].channels_last != param.reordered();
  const bool is_code = entry.target == nullptr && sources.dtype == DType::kUInt8;
  if (reordered && (each > 1 || is_code))
    throw FormatError(
        "'{}' has states in 8 bits, whose blocks count in another memory format in the checkpoint: "
        "make the model channels_last as it was, or load without the optimizer's states: path={}",
        param.name, checkpoint.path());
  all.loaded.push_back({index, reordered, each});
  all.entries.push_back(entry);
  all.params.push_back(std::move(sources));
}

// States that the checkpoint does not have begin anew.
void clear_states(Engine& engine, const std::set<std::pair<int, std::string_view>>& stored) {
  const ShardStates states(engine);
  device::Device& device = engine.device();
  for (const Unit& unit : engine.weights().units()) {
    for (const std::string_view kind : states.storable_kinds_of(unit.id)) {
      const bool whole = std::ranges::all_of(unit.layout.slots(), [&](const plan::Slot& slot) {
        return stored.contains({slot.param, kind});
      });
      if (whole || kind == kValue) continue;
      const StateBlock block = states.block_of(unit.id, kind);
      const Numel shard = unit.layout.shard();
      for_each_range(engine.weights().states(), {&block, 1}, shard, Numel(), shard,
                     offload::Access::kReadWrite, [&](const StateRange& range) {
                       device.fill_zero(range.bytes(0), device.compute_stream());
                     });
    }
  }
}

// Whether the checkpoint has the state as numbers and the engine as codes of 8 bits, or the other
// way round.
bool is_of_other_form(const ShardStates& states, int unit, std::string_view kind,
                      const TrainingCheckpoint& checkpoint, std::size_t tensor) {
  const std::vector<std::size_t>& extents = checkpoint.extents(tensor, kind);
  if (kind == kValue || format::elements_each(kind) > 1 || extents.empty()) return false;
  const bool codes = checkpoint.manifest().extents[extents.front()].dtype == DType::kUInt8;
  return codes != (states.dtype_of(unit, kind) == DType::kUInt8);
}

StateSources sources_of(Engine& engine, const TrainingCheckpoint& checkpoint,
                        const LoadRequest& request) {
  StateSources sources;
  const ShardStates states(engine);
  const Weights& weights = engine.weights();
  for (int p = 0; p < weights.param_count(); ++p) {
    const plan::ParamSpec& param = weights.param(p);
    const auto tensor = checkpoint.find(TensorRole::kParameter, param.known_name());
    if (!tensor || checkpoint.manifest().tensors[*tensor].shape != param.known_shape()) continue;
    const int unit = weights.unit_of(p).id;
    for (const std::string_view kind : states.storable_kinds_of(unit)) {
      const bool wanted = kind == kValue || (request.states && checkpoint.has(*tensor, kind));
      if (!wanted) continue;
      const bool converts = is_of_other_form(states, unit, kind, checkpoint, *tensor);
      add_entry(sources, weights, p, {kind, nullptr, converts}, checkpoint, *tensor);
      if (converts && !states.in_8_bits(unit))
        add_entry(sources, weights, p, {ShardStates::scales_of(kind), nullptr, true}, checkpoint,
                  *tensor);
    }
  }
  for (const StateTarget& target : request.targets) {
    const std::string name = weights.param(target.param).known_name();
    const auto tensor = checkpoint.find(TensorRole::kParameter, name);
    if (tensor && checkpoint.has(*tensor, target.kind))
      add_entry(sources, weights, target.param, {target.kind, &target}, checkpoint, *tensor);
  }
  return sources;
}

void check_same_model(const TrainingCheckpoint& checkpoint, Engine& engine,
                      const LoadRequest& request) {
  UnlikeNames differences = compare(checkpoint, engine);
  const comm::Collectives& ranks = engine.collectives();
  const UnlikeNames buffers =
      compare_buffers(checkpoint, request.buffers, ranks.rank(), ranks.world_size());
  if (request.without_frozen) {
    std::set<std::string> frozen;
    for (const plan::ParamSpec& param : engine.weights().params())
      if (!param.trainable) frozen.insert(param.known_name());
    std::erase_if(differences.missing, [&](const auto& name) { return frozen.contains(name); });
  }
  if (differences.none() && buffers.none()) return;
  std::string text;
  const auto add = [&](std::string_view what, const std::vector<std::string>& names) {
    if (!names.empty())
      text += fmt::format("; {} {}: {}", names.size(), what, format::first_ten(names));
  };
  add("parameters are not in the checkpoint", differences.missing);
  add("are not in the model", differences.unexpected);
  add("have another shape", differences.misshapen);
  add("buffers are not in the checkpoint", buffers.missing);
  add("buffers are not in the model", buffers.unexpected);
  add("buffers have another shape", buffers.misshapen);
  throw FormatError(
      "the checkpoint is of another model{}. To load what both have, ask for "
      "load_module_strict=False: path={}",
      text, checkpoint.path());
}

void store(Engine& engine, const checkpoint::CheckpointFiles& files, const StateSources& sources,
           const format::WeightMap& map, const LoadRequest& request, io::IoEngine& io,
           const checkpoint::RingOptions& staging) {
  std::set<std::pair<int, std::string_view>> stored;
  for (std::size_t i = 0; i < sources.entries.size(); ++i) {
    if (sources.entries[i].target == nullptr)
      stored.emplace(sources.loaded[i].param, sources.entries[i].kind);
  }
  if (request.states) clear_states(engine, stored);
  ShardStates states(engine);
  StateConversion conversion(engine, states);
  device::Device& device = engine.device();
  const auto store_values = [&](std::size_t i, Numel begin, Numel numel, const std::byte* values,
                                DType dtype) {
    const auto& [kind, target, converts] = sources.entries[i];
    const int param = sources.loaded[i].param;
    if (converts) {
      const bool are_scales = format::elements_each(kind) > 1;
      const std::string_view state =
          kind.substr(0, kind.size() - (are_scales ? format::kScales.size() : 0));
      return conversion.add(param, state, are_scales, begin, numel, values, dtype);
    }
    if (target == nullptr) return states.enqueue_store(param, kind, begin, numel, values, dtype);
    const Numel first = begin - engine.weights().owned_range(param).first;
    const std::size_t bytes = bytes_of(numel, dtype).size();
    device.copy({target->memory + bytes_of(first, dtype).size(), bytes}, {values, bytes},
                device.compute_stream());
  };
  const checkpoint::Verification verify = files.verification();
  LoadSource source{files.pointers(), map, {}, io, staging};
  source.phase = "checkpoint";
  source.verify = &verify;
  source.block = files.block();
  source.staging.buffer_bytes =
      std::max(align_up(staging.buffer_bytes, source.block), source.block * 2);
  load_values(engine, source, {sources.loaded, store_values, [&] { conversion.settle(); }});
}

using Json = nlohmann::json;

// Runs `read`, and says of which checkpoint a member is not what it should be.
template <typename Read>
void reading(std::string_view training, std::string_view path, Read&& read) {
  try {
    read(Json::parse(training));
  } catch (const Json::exception& error) {
    throw FormatError("the training state of a checkpoint is not as Strata writes it: {}: path={}",
                      error.what(), path);
  }
}

}  // namespace

void load_training(Engine& engine, const TrainingCheckpoint& checkpoint, const LoadRequest& request,
                   io::IoEngine& io, const checkpoint::RingOptions& staging) {
  comm::Collectives& collectives = engine.collectives();
  std::optional<checkpoint::CheckpointFiles> files;
  StateSources sources;
  std::optional<format::WeightMap> map;
  engine.finish_step();
  engine.state_offload().require_all("loading a checkpoint");
  agree_after(collectives, kLoadingTraining, [&] {
    if (request.strict) check_same_model(checkpoint, engine, request);
    sources = sources_of(engine, checkpoint, request);
    map.emplace(sources.params, sources.tensors, checkpoint.path());
    std::set<std::size_t> wanted;
    const auto ranges = wanted_ranges(engine.weights(), sources.loaded);
    for (const format::RangeCopy& copy : map->intersect(ranges)) wanted.insert(copy.file);
    files.emplace(checkpoint.path(), checkpoint.manifest(), wanted);
    engine.prepare();
  });
  // No rank stores before all ranks have released their gathered units.
  agree_after(collectives, kLoadingTraining, [&] { engine.gatherer().invalidate(Changed::kAll); });
  try {
    agree_after(collectives, kLoadingTraining,
                [&] { store(engine, *files, sources, *map, request, io, staging); });
    engine.weights_changed();
  } catch (const std::exception& error) {
    engine.loading_failed(error.what());
    throw;
  }
}

std::string with_progress(std::string_view training, Engine& engine, const StepControl& control) {
  Json json = Json::parse(training);
  const StepControl::State state = control.state();
  json["global_steps"] = state.global_steps;
  json["micro_steps"] = state.micro_steps;
  json["micro_batches"] = state.micro_batches;
  json["skipped_steps"] = state.skipped_steps;
  json["loss_scale"] = state.loss_scale.scale;
  json["loss_scaler"] = state.loss_scale;
  if (const auto* native = dynamic_cast<NativeOptimizer*>(engine.optimizer())) {
    Json missed = Json::object();
    for (int p = 0; p < engine.weights().param_count(); ++p) {
      const std::int64_t steps = native->steps() - native->states().steps_of(p);
      if (steps != 0) missed[engine.weights().param(p).known_name()] = steps;
    }
    json["optimizer_steps"] = {{"all", native->steps()}, {"missed", std::move(missed)}};
  }
  return json.dump();
}

void restore_progress(std::string_view training, StepControl& control, std::string_view path) {
  reading(training, path, [&](const Json& json) {
    StepControl::State state = control.state();
    state.global_steps = json.value("global_steps", std::int64_t{0});
    state.micro_steps = json.value("micro_steps", std::int64_t{0});
    state.micro_batches = json.value("micro_batches", state.micro_steps);
    state.skipped_steps = json.value("skipped_steps", std::int64_t{0});
    const auto scaler = json.find("loss_scaler");
    if (scaler != json.end() && control.loss_scaler().dynamic()) scaler->get_to(state.loss_scale);
    control.set_state(state);
  });
}

void restore_optimizer_steps(std::string_view training, Engine& engine, std::string_view path) {
  auto* const native = dynamic_cast<NativeOptimizer*>(engine.optimizer());
  if (native == nullptr) return;
  reading(training, path, [&](const Json& json) {
    const Json steps = json.value("optimizer_steps", Json::object());
    const std::int64_t all = steps.value("all", json.value("global_steps", std::int64_t{0}));
    const Json missed = steps.value("missed", Json::object());
    std::vector<std::int64_t> by_param;
    for (int p = 0; p < engine.weights().param_count(); ++p)
      by_param.push_back(all -
                         missed.value(engine.weights().param(p).known_name(), std::int64_t{0}));
    native->states().set_steps(all, by_param);
  });
}

}  // namespace strata::engine
