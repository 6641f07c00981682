// The weights of a model as this rank holds them: one SharedBuffer with every unit's shard (and its
// neighbours that this rank holds for others, ShardPosition::parts), or the whole flat buffer of
// units that stay whole; and the fp32 masters of the trainable shards (plan/unit_plan.h).
//
// Values enter by store(), a range of one parameter at a time, in any dtype. A rank keeps those of
// its own shard, rounded once to the weight's dtype; the master takes the unrounded value. Threads:
// one thread at a time. Errors: UsageError on ranges outside a parameter.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "strata/device/device.h"
#include "strata/engine/unit/engine_options.h"
#include "strata/engine/unit/unit.h"
#include "strata/engine/unit/weight_shards.h"
#include "strata/memory/ledger.h"
#include "strata/offload/host_memory.h"
#include "strata/offload/state_store.h"
#include "strata/plan/unit_plan.h"

namespace strata::engine {

// The stores of values that are not in the collectives' memory.
struct Stores {
  std::shared_ptr<offload::StateStore> states;   // masters, and what the optimizer keeps
  std::shared_ptr<offload::StateStore> weights;  // of offloaded units; null: there are none

  // StateStore::advance() of each.
  void advance() const {
    states->advance();
    if (weights != nullptr) weights->advance();
  }
};

class Weights {
 public:
  // Memory is taken unit by unit, in their order, when values come, or for all by back_all();
  // contents are zero. `masters`: where the weights are bf16.
  Weights(std::span<const plan::ParamSpec> params, const plan::ModelPlan& plan,
          const EngineOptions& options, plan::Masters masters, comm::Collectives& collectives,
          device::Device& device, const Stores& stores);

  std::vector<Unit>& units() { return units_; }
  const std::vector<Unit>& units() const { return units_; }
  const plan::ParamSpec& param(int index) const { return nth(params_, index); }
  plan::ParamSpec& spec_of(int param) { return nth(params_, param); }
  int param_count() const { return static_cast<int>(params_.size()); }
  std::span<const plan::ParamSpec> params() const { return params_; }
  Unit& unit_of(int param) { return nth(units_, nth(unit_of_param_, param)); }
  const Unit& unit_of(int param) const { return nth(units_, nth(unit_of_param_, param)); }
  // Throws UsageError for a frozen parameter, which gets no gradient.
  const Unit& trainable_unit_of(int param) const;
  const plan::Slot& slot_of(int param) const {
    const auto p = static_cast<std::size_t>(param);
    const Unit& unit = nth(units_, unit_of_param_[p]);
    return nth(unit.layout.slots(), slot_of_param_[p]);
  }
  int slot_index_of(int param) const { return nth(slot_of_param_, param); }

  // Sets elements [begin, begin + numel) of `param`. Elements outside this rank's shard are
  // ignored. The source may be host or device memory, and may change when this returns.
  void store(int param, Numel begin, Numel numel, const std::byte* source, DType source_dtype) {
    enqueue_store(param, begin, numel, source, source_dtype);
    device_.compute_stream().synchronize();
  }
  // The same, queued on the device's compute stream: the source must stay until the stream has read
  // it. If `owed` is given, it records the masters that make_masters() can make from the weights
  // later, instead of now.
  void enqueue_store(int param, Numel begin, Numel numel, const std::byte* source,
                     DType source_dtype, OwedMasters* owed = nullptr);
  // Queues the making of all owed masters. Until then they have their old values.
  void make_masters(OwedMasters& owed);
  // As enqueue_store(), but also writes other ranks' parts of a unit that stays whole: no gather is
  // needed when every rank does so for every value.
  void enqueue_store_everywhere(int param, Numel begin, Numel numel, const std::byte* source,
                                DType source_dtype);
  // Takes the memory of every unit that has none yet.
  void back_all() { back(static_cast<int>(units_.size()) - 1); }

  // offload_states() moves all values in device memory to the host for a while, or none. This tells
  // whether the collectives can give that memory back; true if there is none.
  bool can_offload() const { return memory_->buffer->releasable(); }
  // Copies the values, and may throw OutOfMemoryError; drop_copy() undoes it.
  void copy_for_offload(bool pinned);
  void drop_copy() { offloaded_.reset(); }
  // Gives the memory back to the device, when no rank reads it any more. Units are `away` then.
  void offload_states();
  // Takes the memory and the values back, at the same addresses; may throw OutOfMemoryError, and be
  // called again. Units stay `away`; the caller ends that when all ranks have done so.
  void reload_states();

  // The part of `param` that this rank owns: [first, second) in elements; empty when none.
  std::pair<Numel, Numel> owned_range(int param) const;

  plan::MasterForm master_form(int unit) const { return masters_.form(unit); }
  // Both serve units that have their memory: all, after back_all().
  MasterStates& masters() { return masters_; }
  offload::StateStore& states() { return states_; }
  // The weights of sharded units.
  const WeightShards& shards() const { return shards_; }

 private:
  // Takes the memory of the units up to this one.
  void back(int unit);
  void store_piece(const Unit& unit, Numel shard_offset, Numel numel, const std::byte* source,
                   DType source_dtype, OwedMasters* owed = nullptr);
  void write(std::byte* target, DType dtype, Numel numel, const std::byte* source,
             DType source_dtype);
  void store_through_scratch(const Unit& unit, Numel shard_offset, Numel numel,
                             const std::byte* source, DType source_dtype);

  std::vector<plan::ParamSpec> params_;
  std::vector<int> unit_of_param_;
  std::vector<int> slot_of_param_;
  std::vector<Unit> units_;
  comm::ShardPosition place_;
  device::Device& device_;
  offload::StateStore& states_;
  // Goes with the last that keeps it (Unit::memory).
  struct Memory {
    memory::Charge charge;
    std::unique_ptr<comm::SharedBuffer> buffer;
  };
  std::vector<Bytes> offsets_;  // of units in `memory_`, and its end
  std::shared_ptr<Memory> memory_;
  std::size_t backed_ = 0;  // units that have their memory
  WeightShards shards_;
  MasterStates masters_;
  std::unique_ptr<device::Memory> scratch_;  // for sources that kernels cannot read; null: none yet
  std::unique_ptr<offload::OffloadedCopy> offloaded_;  // null: not offloaded
};

}  // namespace strata::engine
