// The view of the model that Strata's Adam and a user's optimizer (any elementwise torch.optim)
// have: for each trainable unit the fp32 masters and the fp32 gradient of this rank's shard, cut
// into segments by parameter. Threads: one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "strata/base/error.h"
#include "strata/comm/collectives.h"
#include "strata/device/device.h"
#include "strata/engine/record/step_recorder.h"
#include "strata/engine/reduce/gradient_shards.h"
#include "strata/engine/reduce/reducer.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/weights.h"
#include "strata/kernels/update.h"
#include "strata/offload/state_store.h"
#include "strata/plan/flat_layout.h"

namespace strata::engine {

class OptimizerShards {
 public:
  OptimizerShards(Weights& weights, GradientShards& gradients, int rank);

  struct UnitShard {
    int unit = 0;
    std::vector<plan::ParamSegment> segments;  // empty where the shard holds nothing but padding
  };
  const std::vector<UnitShard>& units() const { return units_; }
  // A frozen unit has become trainable: it is now the last of units(). Or parameters of a unit have
  // other groups.
  void add(int unit);
  // The numbers of units(): those in `first` come first, in their order, then the others.
  std::vector<int> order(std::span<const int> first) const;
  // The place of a trainable unit in units().
  std::size_t index_of(int unit) const { return nth(index_, unit); }
  // Whether the unit's masters and optimizer states rest in host memory between steps.
  bool states_on_host(const Unit& unit) const { return tier_of(unit) == memory::Tier::kHost; }
  bool states_on_drive(const Unit& unit) const { return tier_of(unit) == memory::Tier::kNvme; }
  Weights& weights() { return weights_; }
  GradientShards& gradients() { return gradients_; }

 private:
  memory::Tier tier_of(const Unit& unit) const {
    return unit.spec.place.states.value_or(weights_.states().tier());
  }

  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  Weights& weights_;
  GradientShards& gradients_;
  int rank_;
  std::vector<UnitShard> units_;
  std::vector<std::size_t> index_;  // by unit, of trainable ones
};

// The current hyper-parameters of one param group: the members up to `bias_correction`.
using GroupScalars = kernels::UpdateScalars;

// The factor that multiplies every gradient first: clipping and loss scale.
struct GradientScale {
  float value = 1.0F;
  // If not null: device memory with the factor, which the update reads when it runs, instead of
  // `value`. NaN leaves the shards unchanged. Only where takes_late_scale().
  const float* late = nullptr;
  // If not null: that factor, in any thread, once the compute stream has come as far as now.
  std::function<float()> on_host = {};
};

// Updates the shards once. Parameters in GradientShards::left_out() stay unchanged, and so do their
// states.
class ShardedOptimizer : public Interface {
 public:
  // Takes the memory of the states; before the first step, when the weights have theirs.
  virtual void prepare() = 0;
  // OptimizerShards::add() was called for this unit. `is_new`: its parameters have taken part in no
  // step. Between steps.
  virtual void add(int unit, bool is_new) = 0;
  // Called when the update of a unit has been queued. `ended`: when its work has ended that is not
  // in the compute stream; it also reads the unit's gradient.
  using Updated = std::function<void(int unit, std::vector<std::shared_ptr<device::Event>> ended)>;
  // The trainable units in the order in which step() updates them: `first` before the others, in
  // their order, where the optimizer has a choice.
  virtual std::vector<int> order(std::span<const int> first) const = 0;
  // `groups`: by param group index. `updated` is called for every unit of order(first), in that
  // order.
  virtual void step(std::span<const GroupScalars> groups, const GradientScale& scale,
                    std::span<const int> first, const Updated& updated) = 0;
  // Before step(), in its backward pass: updates a unit whose gradients are complete, with nothing
  // left out, and with factor 1. step() then leaves it. False: it did nothing.
  virtual bool update_early(int /*unit*/, std::span<const GroupScalars> /*groups*/) {
    return false;
  }
  // No step() follows such updates, which are lost: all states are set anew.
  virtual void forget_early() {}
  // Work of step() may go on beside the caller. This throws the first error of it, once, and with
  // `waits` returns when all of it is done.
  virtual void throw_failure(bool /*waits*/) {}
  // The lanes of the last step that is over; absent: it had no two.
  virtual std::optional<LaneTimes> lane_times() const { return std::nullopt; }
  // State of the host that is cached in free memory of the device.
  virtual Bytes cached() const { return {}; }
  // Frees that memory if others want it. Any thread. Returns whether it freed some.
  virtual bool give_back_memory() { return false; }
  // In which a unit's kernels run.
  virtual device::Stream& stream() = 0;
  virtual bool takes_late_scale() const { return false; }
  // The late scale of the last step() was NaN, so that step did not count.
  virtual void forget_step() { STRATA_ASSERT(false); }
  virtual std::int64_t steps() const = 0;  // updates made
  // No step comes for a while: frees the memory that each step uses and, with `masters`, the
  // masters that it holds.
  virtual void offload_states(bool masters) = 0;
  virtual void reload_states() = 0;
};

// Null where there is no rule. Collective for a rule of whole parameters. The optimizer notifies
// `watch` of copies between the host and the device.
std::unique_ptr<ShardedOptimizer> make_optimizer(UpdateRule rule, const EngineOptions& options,
                                                 OptimizerShards& shards,
                                                 comm::Collectives& collectives,
                                                 device::Device& device,
                                                 offload::StateStore& states,
                                                 offload::LinkWatch& watch);

// Collective, between passes, with no states offloaded: from now on these parameters, which were
// frozen, get gradients and updates, by the values of their groups. Their units get masters, which
// begin at the weights, room for gradients, and states of the optimizer. Parameters that stay
// frozen in such a unit have room there, too, but do not change. Bias correction counts steps from
// here. `optimizer`: null where no optimizer updates the weights.
//
// Errors: CommError where a rank does something else meanwhile, ConfigError where it unfreezes
// other parameters, both with their names; OutOfMemoryError, on every rank.
void train_frozen(std::span<const int> params, Weights& weights, Reducer& reducer,
                  OptimizerShards& shards, ShardedOptimizer* optimizer,
                  comm::Collectives& collectives);

}  // namespace strata::engine
