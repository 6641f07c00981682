// Makes the optimizer that updates an engine's shards. Threads: one. Ownership: borrows all, for as
// long as the optimizer lives. Errors: none.
#pragma once

#include <memory>

#include "strata/device/device.h"
#include "strata/engine/optimize/optimizer_shards.h"
#include "strata/engine/optimize/update_rule.h"
#include "strata/offload/link_watch.h"
#include "strata/offload/state_store.h"

namespace strata::engine {

// Null where there is no rule. `moments`: their type where masters are rounded. The optimizer
// notifies `watch` of copies between the host and the device.
std::unique_ptr<ShardedOptimizer> make_optimizer(UpdateRule rule, DType moments,
                                                 OptimizerShards& shards, device::Device& device,
                                                 offload::StateStore& states,
                                                 offload::LinkWatch& watch);

}  // namespace strata::engine
