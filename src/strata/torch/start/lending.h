// Values that an engine gets from the same device, from rank 0, and from other models that have
// sharded their parameters already (zero.Init) and lend them. Threads: the engine's. Ownership:
// borrows all. Errors: those of the owners, CommError, those of the stores of offloaded weights,
// and OutOfMemoryError for the buffer, or as the engine's memory grows.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

// Stores values into the engine's weights: from tensors on the same device, read in place, and from
// tensors that rank 0 sends. Units that stay whole get complete values. HostIntake takes values on
// the host to an engine on a device. Work is in order with the current stream, on which the
// tensors' memory may be used again.
class ValueIntake {
 public:
  // The most that rank 0 sends at once.
  static constexpr Bytes kPiece = 16_MiB;

  // Borrows the engine, which lies on `place`.
  ValueIntake(engine::Engine& engine, c10::Device place) : engine_(engine), place_(place) {}

  // Stores the values of `param` from element `begin` on; contiguous, on `place`.
  void store(int param, Numel begin, const at::Tensor& values);
  // Collective: stores rank 0's values, which may lie on any device. Other ranks' tensors give
  // shape and dtype only. At most kPiece.
  void store_from_rank_0(int param, Numel begin, const at::Tensor& values);

 private:
  at::Tensor piece_like(const at::Tensor& values);

  engine::Engine& engine_;
  c10::Device place_;
  std::unique_ptr<device::Memory> piece_;  // null: nothing was sent yet
};

// Collective: moves parameters of other models into the engine that takes them over. If both cut a
// parameter alike, its values stay on their ranks. If it has at most 32 pieces and training does
// not use it in tiles, it is gathered. Otherwise it moves piece by piece. The owners retire.
// `piece`: the bytes that owners lend at once.
void take_from_owners(engine::Engine& engine, ValueIntake& intake,
                      const std::vector<ModelParameter>& parameters, Bytes piece);

// Whether pieces can be lent. Ranks of shard groups cannot lend: they hold more than their own
// part, and gather.
bool lends_pieces(engine::Engine& engine);

// Lends the values of a sharded parameter to another model that takes it over: piece by piece, so
// that the parameter is whole nowhere. Collective, unless only own parts are lent.
void lend_pieces(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing);

}  // namespace strata::torch
