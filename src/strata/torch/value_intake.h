// Values of tensors on their way into the engine's shards, wherever the tensors lie. Memory of the
// engine's device is read where it is; any other comes through a bounded piece of the device's
// memory, and of it no more than this rank keeps. Threads: the engine's. Ownership: borrows the
// engine. Work is in order with the current stream, on which the tensors' memory may be used again.
// Errors: OutOfMemoryError for the piece.
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
  void copy_in(int param, Numel begin, const at::Tensor& values);
  at::Tensor piece_like(const at::Tensor& values);

  engine::Engine& engine_;
  c10::Device place_;
  std::unique_ptr<device::Memory> piece_;
};

}  // namespace strata::torch
