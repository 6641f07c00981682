#include "strata/torch/start/init_choice.h"

#include <fmt/core.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "strata/base/error.h"
#include "strata/engine/unit/agreement.h"
#include "strata/memory/system_memory.h"
#include "strata/torch/base/host_threads.h"
#include "strata/torch/base/placement.h"

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
  switch (rule) {
    case engine::UpdateRule::kNone:
    case engine::UpdateRule::kExternal:  // it keeps its states itself
      needs.states_per_master = 0;
      break;
    case engine::UpdateRule::kAdam:
    case engine::UpdateRule::kAdamW:
      needs.states_per_master = 2;
      break;
  }
  return needs;
}

}  // namespace

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
  const plan::OptimizerNeeds needs = needs_of(rule, engine_options_of(model, config));
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
      plan::init_tier_from(config.strata.init_tier), alternatives);
}

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

void require_staging_room(const engine::EngineOptions& options, int ranks_of_host,
                          Bytes available) {
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
  if (wanted <= available / ranks_of_host) return;
  throw OutOfMemoryError(fmt::format(
      "the host has less memory than what drives are to be staged through (buffer_count times "
      "buffer_size, and max_in_cpu); lower one of them: some megabytes suffice. Wanted by each of "
      "{} ranks of this host: {} ({}); available for each: {}",
      ranks_of_host, to_string(wanted), parts, to_string(available / ranks_of_host)));
}

}  // namespace strata::torch
