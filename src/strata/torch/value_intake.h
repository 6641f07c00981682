// Values of tensors on their way into the engine's weights, wherever the tensors lie. Memory of the
// engine's device is read where it is, and units that stay whole get it all. Any other comes
// through two bounded buffers of pinned host memory, filled by several threads while the device
// takes the one before, and of it no more than this rank keeps. Threads: the engine's. Ownership:
// borrows the engine. Work is in order with the current stream, on which the tensors' memory may be
// used again. Errors: OutOfMemoryError for the buffers.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>

#include "strata/base/thread_pool.h"
#include "strata/engine/engine.h"

namespace strata::torch {

inline constexpr Bytes kIntakePiece = 16_MiB;

class ValueIntake {
 public:
  // Borrows all.
  ValueIntake(engine::Engine& engine, c10::Device place, ThreadPool& threads)
      : engine_(engine), place_(place), threads_(threads) {}
  // Waits until the device has taken what it was given.
  ~ValueIntake();
  ValueIntake(const ValueIntake&) = delete;
  ValueIntake& operator=(const ValueIntake&) = delete;

  // Elements of `param` from `begin` on have these values now; contiguous, on any device.
  void store(int param, Numel begin, const at::Tensor& values);
  // Collective: the same, with the values of rank 0; those of other ranks give shape and dtype. At
  // most a piece.
  void store_from_rank_0(int param, Numel begin, const at::Tensor& values);
  // Whether units that stay whole have been given whole so far, by this rank.
  bool complete() const { return complete_; }

 private:
  struct Buffer {
    std::unique_ptr<device::HostMemory> memory;  // null: not used yet
    std::unique_ptr<device::Event> taken;        // null: free
  };

  void store_from_device(int param, Numel begin, const at::Tensor& values);
  void store_from_host(int param, Numel begin, const at::Tensor& values);
  std::span<std::byte> next_buffer();
  at::Tensor piece_like(const at::Tensor& values);

  engine::Engine& engine_;
  c10::Device place_;
  ThreadPool& threads_;
  std::unique_ptr<device::Memory> piece_;  // of the device, for what rank 0 sends
  std::array<Buffer, 2> buffers_;
  std::size_t turn_ = 0;
  bool complete_ = true;
};

}  // namespace strata::torch
