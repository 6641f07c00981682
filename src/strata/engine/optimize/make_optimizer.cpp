#include "strata/engine/optimize/make_optimizer.h"

#include "strata/engine/optimize/adam_optimizer.h"
#include "strata/engine/optimize/external_optimizer.h"

namespace strata::engine {

std::unique_ptr<ShardedOptimizer> make_optimizer(UpdateRule rule, DType moments,
                                                 OptimizerShards& shards, device::Device& device,
                                                 offload::StateStore& states,
                                                 offload::LinkWatch& watch) {
  switch (rule) {
    case UpdateRule::kNone:
      return nullptr;
    case UpdateRule::kAdam:
    case UpdateRule::kAdamW:
      return std::make_unique<AdamOptimizer>(shards, device, states, rule == UpdateRule::kAdamW,
                                             watch, moments);
    case UpdateRule::kExternal:
      return std::make_unique<ExternalOptimizer>(shards, device, watch);
  }
  return nullptr;
}

}  // namespace strata::engine
