// An optimizer that the user brings (torch.optim and the like): it updates the fp32 master shards
// in place through spans that stay valid for the engine's life, or until masters are parked, and we
// round the result to the weights. Threads: one thread at a time. Ownership: has the Weights hold
// every master, so those must fit in memory together; gradients are lent to it, scaled where they
// are, unless they are kept in a narrower type; the callback is the layer above.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/optimize/optimizer_shards.h"

namespace strata::engine {

// What this rank owns of one parameter: what the layer above wraps as a tensor.
struct ExternalSegment {
  int param = 0;
  int group = 0;
  std::span<float> weight;
};

class ExternalOptimizer final : public ShardedOptimizer {
 public:
  // `gradients`: scaled, of each of segments(), as long as its weight; empty where no rank
  // had one in this step. They are the callback's until it returns.
  using Update = std::function<void(std::span<const std::span<float>> gradients)>;

  ExternalOptimizer(OptimizerShards& shards, device::Device& device);

  const std::vector<ExternalSegment>& segments() {
    prepare();
    return segments_;
  }
  // add() puts more at its end, and may give others another group.
  // Called by step(); must update the weights of the segments.
  void set_update(Update update) { update_ = std::move(update); }

  void prepare() override;
  void add(int unit, bool is_new) override;
  std::vector<int> order(std::span<const int> /*first*/) const override {
    return shards_.order({});
  }
  void step(std::span<const GroupScalars> groups, const GradientScale& scale,
            std::span<const int> first, const Updated& updated) override;
  std::int64_t steps() const override { return steps_; }
  // Segments are others from then on: segments() has them, after unpark().
  void park(bool masters) override;
  void unpark() override {}

 private:
  std::span<float> scaled_gradient(std::size_t index, float scale);
  void round(const OptimizerShards::UnitShard& shard);

  OptimizerShards& shards_;
  device::Device& device_;
  bool prepared_ = false;
  std::vector<ExternalSegment> segments_;
  // fp32 copies of gradients that are kept in a narrower type, by trainable unit; null: none yet.
  std::vector<std::unique_ptr<device::Memory>> widened_;
  Update update_;
  std::int64_t steps_ = 0;
};

}  // namespace strata::engine
