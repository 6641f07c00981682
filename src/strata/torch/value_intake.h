// Values of tensors on their way into the engine's shards, wherever the tensors lie: of each no
// more moves than this rank keeps. Threads: the engine's. Ownership: borrows the engine. Work on
// memory of the engine's device is in order with the current stream, on which torch may use the
// memory again; memory of the host may change when a call returns. Memory: a bounded piece of the
// device's for what ranks send. Errors: OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "strata/engine/engine.h"

namespace strata::torch {

inline constexpr Bytes kIntakePiece = 16_MiB;

class ValueIntake {
 public:
  ValueIntake(engine::Engine& engine, c10::Device place) : engine_(engine), place_(place) {}

  // Elements of `param` from `begin` on have these values now; contiguous, on any device.
  void store(int param, Numel begin, const at::Tensor& values);
  // Collective: the same, with the values of rank 0; those of other ranks give shape and dtype. At
  // most a piece.
  void store_from_rank_0(int param, Numel begin, const at::Tensor& values);

 private:
  at::Tensor piece_like(const at::Tensor& values);

  engine::Engine& engine_;
  c10::Device place_;
  std::unique_ptr<device::Memory> piece_;
};

}  // namespace strata::torch
