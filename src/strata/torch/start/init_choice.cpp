#include "strata/torch/start/init_choice.h"

#include <fmt/core.h>

#include <algorithm>
#include <sstream>

#include "strata/base/error.h"
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

plan::InitFacts facts_of(const ModelInput& input, const ModelRuntime& runtime) {
  release_cached_memory(runtime.place);
  plan::InitFacts facts;
  facts.device_free = runtime.device->free_bytes();
  facts.host_free = memory::available_memory() / ranks_of_host(runtime.collectives->world_size());
  // Ranks on the host share its free memory; each GPU belongs to one rank.
  if (runtime.place.is_cpu()) facts.device_free = std::min(facts.device_free, facts.host_free);
  facts.can_grow = can_grow(*runtime.device);
  for (const ModelParameter& parameter : input.parameters) {
    if (!parameter.has_own_values()) continue;
    const Bytes bytes(static_cast<std::int64_t>(parameter.variable.nbytes()));
    (parameter.variable.device() == runtime.place ? facts.device_values : facts.host_values) +=
        bytes;
  }
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

}  // namespace strata::torch
