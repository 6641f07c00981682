#include "strata/engine/optimize/staging_need.h"

#include <algorithm>

#include "strata/engine/config/offload_config.h"
#include "strata/offload/part.h"
#include "strata/plan/flat_layout.h"

namespace strata::engine {
namespace {

Bytes pages(Bytes bytes) {
  return align_up(bytes, offload::kPartAlignment);
}

Bytes master_pages(plan::MasterForm form, Numel numel) {
  if (form != plan::MasterForm::kRemainder) return pages(plan::master_bytes(form, numel));
  return pages(Bytes(2 * numel.value)) + pages(Bytes((numel.value + 7) / 8));
}

}  // namespace

void cap_staging(EngineOptions& options, std::span<const plan::ParamSpec> params,
                 const plan::ModelPlan& plan, UpdateRule rule, int shards) {
  const auto on_drive = [](const offload::StatePlace& place, std::optional<memory::Tier> own) {
    return own.value_or(place.tier) == memory::Tier::kNvme;
  };
  const plan::Masters masters = masters_for(rule, options);
  Bytes states;
  Bytes weights;
  for (const plan::UnitSpec& unit : plan.units) {
    const plan::FlatLayout layout(params, unit.params, unit.dtype, shards);
    if (options.stage == 3 && !unit.persistent && on_drive(options.weights, unit.place.weights))
      weights += pages(layout.shard_bytes());
    if (rule == UpdateRule::kNone || !unit.trainable ||
        !on_drive(options.states, unit.place.states))
      continue;
    const plan::MasterForm form = plan::master_form(unit, masters);
    const bool narrow = form == plan::MasterForm::kRounded;
    const DType moment = narrow ? options.moment_dtype : DType::kFloat32;
    states += master_pages(form, layout.shard()) + pages(bytes_of(layout.shard(), moment)) * 2;
  }
  const auto cap = [](offload::StatePlace& place, Bytes need) {
    // Loading cuts blocks into other parts than the update, which leaves gaps.
    place.budget = std::min(place.budget, std::max(need + need / 2, kLeastStaging));
  };
  cap(options.states, states);
  cap(options.weights, weights);
}

}  // namespace strata::engine
