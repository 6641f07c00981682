// Values of tensors that lie where the engine's weights do, and values that rank 0 sends: read
// where they are; units that stay whole get them whole. Values on the host of an engine on a device
// go through host_intake.h. Threads: the engine's. Ownership: borrows the engine. Work is in order
// with the current stream, on which the tensors' memory may be used again. Errors: OutOfMemoryError
// for the buffer, or as the engine's memory grows.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "strata/engine/engine.h"

namespace strata::torch {

class ValueIntake {
 public:
  // The most that rank 0 sends at once.
  static constexpr Bytes kPiece = 16_MiB;

  // Borrows the engine, which lies on `place`.
  ValueIntake(engine::Engine& engine, c10::Device place) : engine_(engine), place_(place) {}

  // Elements of `param` from `begin` on have these values now; contiguous, on `place`.
  void store(int param, Numel begin, const at::Tensor& values);
  // Collective: the same, with the values of rank 0, on any device; those of other ranks give shape
  // and dtype. At most a piece.
  void store_from_rank_0(int param, Numel begin, const at::Tensor& values);

 private:
  at::Tensor piece_like(const at::Tensor& values);

  engine::Engine& engine_;
  c10::Device place_;
  std::unique_ptr<device::Memory> piece_;  // null: nothing was sent yet
};

}  // namespace strata::torch
