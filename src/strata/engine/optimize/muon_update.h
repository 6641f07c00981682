// Muon over this rank's shards of matrices: their momentum, one orthogonalization a step by the
// rank that owns the matrix (matrix_plan.h), and the update of the masters. Momentum and update
// work element by element, on the shards, with the arithmetic of torch.optim.Muon; MatrixExchange
// brings matrices to their owners as bf16, and back.
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
// ConfigError on every rank where ranks plan other owners, or hold shards in parts.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "strata/engine/optimize/matrix_exchange.h"
#include "strata/engine/optimize/native_states.h"

namespace strata::engine {

// A parameter's own settings under the rule kMuon. It also uses lr, weight_decay and beta1, the
// momentum, of its group.
struct MuonParam {
  double factor = 1.0;  // of the update
  bool nesterov = true;
};

class MuonUpdate {
 public:
  // Replaces the values of matrices by the result.
  using Orthogonalize = std::function<void(std::span<const OwnedMatrices>)>;

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
    exchange_.free();
    scratch_.reset();
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
  // Plans anew where other parameters train than before.
  void plan();
  std::span<const float> gradient_of(int unit, Numel begin, Numel numel);
  // `x`: of the owner, for the elements of this rank's shard.
  void make_momentum(const MatrixRun& run, const MatrixPiece& piece, const GroupScalars& group,
                     float factor, std::span<std::byte> x);
  void advance(std::span<std::byte> momentum, DType dtype, std::span<const float> gradient,
               const GroupScalars& group, const MuonParam& param, float factor, std::byte* target);
  // `update`: in bf16.
  void apply(const MatrixRun& run, const MatrixPiece& piece, const GroupScalars& group,
             std::span<const std::byte> update);

  static constexpr MuonParam kDefault{};

  OptimizerShards& shards_;
  const NativeStates& states_;
  offload::StateStore& store_;
  comm::Collectives& collectives_;
  device::Device& device_;
  MatrixExchange exchange_;
  std::vector<int> planned_;  // parameters
  std::vector<MuonParam> params_;
  Orthogonalize orthogonalize_;  // null: values travel alone
  Numel room_;                   // elements of a piece that is computed at once
  std::unique_ptr<device::Memory> scratch_;
};

}  // namespace strata::engine
