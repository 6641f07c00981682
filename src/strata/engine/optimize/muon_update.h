// Muon over this rank's shards of matrices: their momentum, one orthogonalization a step by the
// rank that owns the matrix, and the update of the masters. Momentum and update work element by
// element, on the shards, with the arithmetic of torch.optim.Muon; matrices travel to their owner
// as bf16, and back.
//
//   momentum  m += (1 - mu) (g - m);  x = g + mu (m - g), or m without Nesterov
//   owner     x becomes O = orthogonalize(x)
//   update    w *= 1 - lr wd;  w -= lr factor O
//
// g is the step's gradient: reduced, accumulated, unscaled and clipped.
//
// The layer above brings the function that orthogonalizes, since products of matrices are its
// trade. Threads: one thread at a time; run() is collective. Ownership: borrows the shards, the
// states, the store and the device. Errors: those of the store and of the function, on every rank;
// those of WholeParameters.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/engine/optimize/native_states.h"
#include "strata/engine/optimize/whole_parameters.h"

namespace strata::engine {

// A parameter's own settings under the rule kMuon. It also uses lr, weight_decay and beta1, the
// momentum, of its group.
struct MuonParam {
  double factor = 1.0;  // of the update
  bool nesterov = true;
};

class MuonUpdate {
 public:
  // `values`: those of the whole parameter `param`, in bf16, on the device: replaces them by the
  // result.
  using Orthogonalize = std::function<void(int param, std::span<std::byte> values)>;

  // Collective. `name`: the engine's.
  MuonUpdate(OptimizerShards& shards, const NativeStates& states, offload::StateStore& store,
             comm::Collectives& collectives, device::Device& device, const std::string& name);

  // `params`: by parameter of the model. Before the first step.
  void set(std::vector<MuonParam> params, Orthogonalize orthogonalize) {
    params_ = std::move(params);
    orthogonalize_ = std::move(orthogonalize);
  }
  // Takes the memory that steps use; run() takes it again after free().
  void prepare();
  void free() {
    owners_.free();
    scratch_.reset();
    outgoing_.reset();
  }
  // Collective. `factor`: of every gradient.
  void run(std::span<const GroupScalars> groups, float factor);

 private:
  bool takes(const Unit& unit) const { return states_.rule(unit.id) == UpdateRule::kMuon; }
  const MuonParam& of(int param) const {
    return static_cast<std::size_t>(param) < params_.size() ? nth(params_, param) : kDefault;
  }
  // The first elements of the scratch memory of this number.
  std::span<float> scratch(int index, Numel numel) const {
    auto* const all = reinterpret_cast<float*>(scratch_->bytes().data());
    return {all + (room_ * index).size(), numel.size()};
  }
  void zero(std::span<float> values) {
    device_.fill_zero(std::as_writable_bytes(values), device_.compute_stream());
  }
  void lerp(std::span<float> values, std::span<const float> to, double weight, float scale);
  void make_momentum(const OptimizerShards::UnitShard& shard, std::span<const GroupScalars> groups,
                     float factor);
  void advance(std::span<std::byte> momentum, DType dtype, std::span<const float> gradient,
               const GroupScalars& group, const MuonParam& param, float factor, std::byte* target);
  void apply(const Unit& unit, int param, Numel begin, std::span<const float> update,
             const GroupScalars& group);

  static constexpr MuonParam kDefault{};

  OptimizerShards& shards_;
  const NativeStates& states_;
  offload::StateStore& store_;
  comm::Collectives& collectives_;
  device::Device& device_;
  WholeParameters owners_;
  std::vector<MuonParam> params_;
  Orthogonalize orthogonalize_;  // null: values travel alone
  Numel room_;                   // elements of a piece that is computed at once
  std::unique_ptr<device::Memory> scratch_;
  std::unique_ptr<device::Memory> outgoing_;  // bf16, of the largest shard
};

}  // namespace strata::engine
