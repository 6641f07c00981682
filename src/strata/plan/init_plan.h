// The way in which a model's values reach the engine's memory: every rank takes the same one, by
// the room that each rank has. The ways, cheapest first:
//   born_flat    there are no values yet; they come from files, straight into the shards
//   device_copy  the model lies on the device, and the engine's memory fits beside it
//   device_grow  the model lies on the device; the engine's memory grows unit by unit while the
//                model's shrinks
//   distributed  each rank moves the 1/world_size of the values that it owns from the host (where
//                the model lies, or where it is put for that time), and ranks gather the rest
//   host         as distributed, with all values put on the host: ranks hold different ones
// All ranks take the same way, so the rank with the least room decides. Pure arithmetic.
// Errors: OutOfMemoryError when no way fits, before anything is moved: the rank that lacks most, by
// how many bytes, and what would fit; ConfigError for a way that was asked for and cannot be taken.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "strata/base/units.h"
#include "strata/plan/param_spec.h"
#include "strata/plan/unit_plan.h"

namespace strata::plan {

// kAuto: choose_init() may take any.
enum class InitTier { kAuto, kDeviceCopy, kDeviceGrow, kDistributed, kHost, kBornFlat };

std::string_view name_of(InitTier tier);

// The values that an optimizer keeps.
struct OptimizerNeeds {
  UpdateRule rule = UpdateRule::kAdamW;  // of parameters that have none of their own
  Masters masters = Masters::kRemainder;
  DType state_dtype = DType::kFloat32;  // narrower where weights are updated rounded
  // Where parameters that name no place have them: what rests elsewhere takes nothing of the
  // device.
  memory::Tier states_tier = memory::Tier::kDevice;  // and masters
  memory::Tier weights_tier = memory::Tier::kDevice;
};

// The bytes that the engine will hold on one rank's device when it is ready.
struct InitDemand {
  Bytes weights;    // shards, or whole units
  Bytes masters;    // what is kept of the trainable shards' fp32 masters: unit_plan.h
  Bytes optimizer;  // the states that the engine keeps
  Bytes largest_unit;
  Bytes total() const { return weights + masters + optimizer; }
};

// `parts`: shards of the weights that a rank holds, of which it owns one.
InitDemand init_demand(std::span<const ParamSpec> params, const ModelPlan& plan, int stage,
                       int world_size, const OptimizerNeeds& optimizer, int parts = 1);

// The free memory of one rank.
struct InitFacts {
  Bytes device_free;     // by the driver, with what the framework's allocator holds unused
  Bytes host_free;       // for this rank
  Bytes device_values;   // of the model, on the device
  Bytes host_values;     // of the model, on the host
  bool can_grow = true;  // the driver maps memory page by page
};

struct InitChoice {
  InitTier tier = InitTier::kBornFlat;
  std::string reason;  // one line with the numbers that led here
};

// A setting that needs less, for the error's message: "stage 3", 12_GiB.
struct InitAlternative {
  std::string name;
  Bytes total;
};

InitChoice choose_init(const InitDemand& demand, std::span<const InitFacts> by_rank,
                       InitTier wanted, std::span<const InitAlternative> alternatives);

}  // namespace strata::plan
