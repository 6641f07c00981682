#include "strata/engine/unit/engine_options.h"

#include <algorithm>

#include "strata/engine/config/offload_config.h"
#include "strata/engine/unit/weight_shards.h"
#include "strata/offload/staging_arena.h"
#include "strata/offload/state_store.h"
#include "strata/plan/flat_layout.h"

namespace strata::engine {
namespace {

Bytes pages(Bytes bytes) {
  return align_up(bytes, offload::kPartAlignment);
}

// The blocks that hold something of each element of a unit's states.
std::vector<StateBlock> blocks_of_states(const plan::UnitSpec& unit, plan::MasterForm form,
                                         UpdateRule rule, DType number) {
  std::vector<StateBlock> blocks;
  if (form == plan::MasterForm::kFloat32) blocks.push_back({});
  if (form == plan::MasterForm::kRemainder) blocks.insert(blocks.end(), {{-1, 16}, {-1, 1}});
  // A user's optimizer has its own states there, too: as many as Adam, say.
  const UpdateRule counted = rule == UpdateRule::kExternal ? UpdateRule::kAdam : rule;
  for (std::size_t i = 0; i < plan::states_of(plan::rule_of(unit.rule, counted)).size(); ++i) {
    if (unit.states == plan::StateForm::k8Bit)
      blocks.insert(blocks.end(), {{-1, 8}, {-1, 32, plan::kBlock8}});
    else
      blocks.push_back({-1, static_cast<int>(size_of(number).value) * 8});
  }
  return blocks;
}

// A part of each of the blocks, all of them whole.
Bytes lease_of(std::span<const StateBlock> blocks, Numel shard) {
  const std::int64_t step = elements_at_once(blocks, Bytes()).value;
  const Numel whole((shard.value + step - 1) / step * step);
  Bytes all;
  for (const StateBlock& block : blocks) all += block.bytes_of(whole);
  return pages(all);
}

// The bytes that one section of the configuration puts on drives.
struct Need {
  Bytes all;
  Bytes lease;  // of the unit that takes most
  void add(Bytes bytes, Bytes of_unit) {
    all += bytes;
    lease = std::max(lease, of_unit);
  }
};

}  // namespace

void cap_staging(EngineOptions& options, std::span<const plan::ParamSpec> params,
                 const plan::ModelPlan& plan, UpdateRule rule, int shards) {
  const auto on_drive = [](const offload::StatePlacement& place, std::optional<memory::Tier> own) {
    return own.value_or(place.tier) == memory::Tier::kNvme;
  };
  const plan::Masters masters = masters_for(rule, options);
  Need states;
  Need weights;
  for (const plan::UnitSpec& unit : plan.units) {
    const plan::FlatLayout layout(params, unit.params, unit.dtype, shards);
    if (options.stage == 3 && !unit.persistent && on_drive(options.weights, unit.place.weights))
      weights.add(pages(layout.shard_bytes()), pages(layout.shard_bytes()));
    if (rule == UpdateRule::kNone || !unit.trainable ||
        !on_drive(options.states, unit.place.states))
      continue;
    const plan::MasterForm form = plan::master_form(unit, masters);
    const bool narrow = form == plan::MasterForm::kRounded;
    const DType moment = narrow ? options.moment_dtype : DType::kFloat32;
    const std::vector<StateBlock> blocks = blocks_of_states(unit, form, rule, moment);
    Bytes all;
    for (const StateBlock& block : blocks) all += pages(block.bytes_of(layout.shard()));
    states.add(all, lease_of(blocks, layout.shard()));
  }
  // Weights and states share one arena evenly: each gets what either needs.
  const bool both = states.all > Bytes() && weights.all > Bytes();
  const Bytes lease = both ? std::max(states.lease, weights.lease) : Bytes();
  const auto cap = [lease](offload::StatePlacement& place, const Need& need) {
    // Loading cuts blocks into other parts than the update, which leaves gaps.
    const Bytes kept = std::max(need.all + need.all / 2, kLeastStaging);
    place.budget = std::min(place.budget, std::max(kept, lease * offload::StagingArena::kShares));
  };
  cap(options.states, states);
  cap(options.weights, weights);
  if (!options.staging || !both) return;
  Bytes& of_states = options.states.budget;
  Bytes& of_weights = options.weights.budget;
  const Bytes all = std::max(*options.staging, kLeastStaging * 2);
  of_states = std::min(of_states, std::max(all - of_weights, all / 2));
  of_weights = std::min(of_weights, all - of_states);
}

}  // namespace strata::engine
