// An optimizer that the user brings (torch.optim and the like): it updates the fp32 master shards
// in place through spans that stay valid for the engine's life, and we round the result to the
// weights. Threads: one thread at a time. Ownership: has the Weights hold every master, so those
// must fit in memory together; the callback is the layer above.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/optimizer_shards.h"

namespace strata::engine {

// One stretch of parameters of one group: what the layer above wraps as a tensor with a gradient.
struct ExternalSegment {
  int group = 0;
  std::span<float> weight;
  std::span<float> gradient;  // rewritten before every call of the callback
};

class ExternalOptimizer final : public ShardedOptimizer {
 public:
  ExternalOptimizer(OptimizerShards& shards, device::Device& device);

  const std::vector<ExternalSegment>& segments() {
    prepare();
    return segments_;
  }
  // Called by step() once gradients are in place; must update every segment's weight.
  void set_update(std::function<void()> update) { update_ = std::move(update); }

  void prepare() override;
  void step(std::span<const GroupScalars> groups, const GradientScale& scale,
            std::span<const int> first, const Updated& updated) override;
  std::int64_t steps() const override { return steps_; }

 private:
  OptimizerShards& shards_;
  device::Device& device_;
  std::vector<std::unique_ptr<device::Memory>> gradients_;  // scaled fp32 copies, by unit
  std::vector<ExternalSegment> segments_;
  std::function<void()> update_;
  std::int64_t steps_ = 0;
};

}  // namespace strata::engine
