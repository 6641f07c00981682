// Stores values into the engine's weights: from tensors on the same device, read in place, and from
// tensors that rank 0 sends. Units that stay whole get complete values. An engine on a device takes
// values on the host by host_intake.h instead. Threads: the engine's. Ownership: borrows the
// engine. Work is in order with the current stream, on which the tensors' memory may be used again.
// Errors: OutOfMemoryError for the buffer, or as the engine's memory grows.
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

}  // namespace strata::torch
