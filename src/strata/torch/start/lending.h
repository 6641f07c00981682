// Values that an engine gets from the same device, from rank 0, and from other models that have
// sharded their parameters already (zero.Init) and lend them. Threads: the engine's, and those that
// read. Ownership: borrows all. Errors: those of the owners, CommError, those of the stores of
// offloaded weights, and OutOfMemoryError for the buffer, or as the engine's memory grows.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <vector>

#include "strata/engine/engine.h"
#include "strata/torch/model/model_plan.h"

namespace strata::torch {

class OriginalValues;

// Stores values into the engine's weights: from tensors on the same device, read in place, and from
// tensors that rank 0 sends. Units that stay whole get complete values. Work is in order with the
// current stream, on which the tensors' memory may be used again.
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

// Collective, if all ranks share rank 0's host: each rank reads its own part in rank 0's memory. So
// rank 0's values win, ranks compare nothing, and no rank reads values that it does not keep. Units
// that stay whole are gathered meanwhile (engine/checkpoint/weight_loader.h).
// `on_host`: this rank's parameters with values there, as the engine's memory grows. `threads`:
// that work on host memory (placement.h). Returns whether it was done, the same on every rank;
// never at world size 1. If not, the engine's weights may be a mixture, and ranks with all values
// on the host give the reason in the init report. It cannot be done if a rank has values elsewhere,
// or none, of a parameter, or cannot read rank 0's memory; nor if rank 0 has values in pages that
// it shares with another process, because reading would duplicate them, or if more than
// `copied_most` bytes are not contiguous. Until this returns rank 0 keeps copies of those, and
// grants the permission to read that the system may ask for (io::OfferedMemory). Call
// Engine::weights_changed() afterwards. Phase: "move in". Errors: those of load_weights_together()
// except IoError.
bool take_from_rank_0(engine::Engine& engine, const OriginalValues& values,
                      std::span<const int> on_host, int threads, Bytes copied_most = 1_GiB);

// Lends the values of a sharded parameter to another model that takes it over: piece by piece, so
// that the parameter is whole nowhere. Collective, unless only own parts are lent. Returns false
// and does nothing where a gather is better: if the parameter may be whole, and for ranks of shard
// groups, which hold more than their own part.
bool lend_pieces(engine::Engine& engine, c10::Device place, int param, const Borrowing& borrowing);

}  // namespace strata::torch
