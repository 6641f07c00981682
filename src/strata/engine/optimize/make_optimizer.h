// Makes the optimizer of an update rule. Threads: one. Ownership: the result borrows all that it is
// given.
#pragma once

#include <memory>

#include "strata/device/device.h"
#include "strata/engine/optimize/optimizer_shards.h"
#include "strata/engine/optimize/update_rule.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// Null for kNone.
std::unique_ptr<ShardedOptimizer> make_optimizer(UpdateRule kind, const EngineOptions& options,
                                                 OptimizerShards& shards, device::Device& device,
                                                 offload::StateStore& states);

}  // namespace strata::engine
