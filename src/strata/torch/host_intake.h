// Values on the host on their way into the engine's weights. Several threads read each byte once:
// they compute the fingerprints by which ranks compare, and copy what this rank keeps into a ring
// of pinned buffers, which the device drains meanwhile. Blocks of which only the fingerprint is
// wanted are read while all buffers are full, and in the end: the link waits for none of them.
// Threads: the engine's, and those of the pool. Ownership: borrows all; values until flush(). Work
// is in order with the current stream. Errors: OutOfMemoryError for the buffers, or as the engine's
// memory grows.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <optional>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/engine/engine.h"
#include "strata/engine/staging_ring.h"
#include "strata/torch/comparison.h"

namespace strata::torch {

class HostIntake {
 public:
  // `comparison`: gets the fingerprints; null: nothing is compared any more. `phase` is told what
  // was moved.
  HostIntake(engine::Engine& engine, ThreadPool& threads, Comparison* comparison,
             engine::InitReport::Phase& phase);

  // Elements of `param` from `begin` on have these values; contiguous. With a comparison it is the
  // whole parameter.
  void add(int param, Numel begin, const at::Tensor& values);
  // All that was added has been read; the device may still be busy with it.
  void flush();
  // Whether units that stay whole have been given whole: other ranks' parts were not, here.
  bool complete() const { return complete_; }

 private:
  struct Block {
    std::span<const std::byte> bytes;  // to fingerprint
    char* fingerprint;                 // null: not wanted
    std::span<const std::byte> kept;   // of them, what goes to `target`
    std::byte* target;
  };
  struct Store {
    int param;
    Numel begin;
    Numel count;
    const std::byte* source;
    DType dtype;
  };

  void keep(int param, Numel begin, Numel count, const Block& block, DType dtype);
  std::byte* take_room(Bytes bytes, bool goes_on);
  void run();
  void take_later(std::size_t most);
  void work_on_all();
  std::size_t thread_count() const;
  static void work_on(const Block& block);

  engine::Engine& engine_;
  ThreadPool& threads_;
  Comparison* comparison_;
  engine::InitReport::Phase& phase_;
  std::optional<engine::StagingRing> ring_;  // none until something is kept
  std::size_t turn_ = 0;
  std::span<std::byte> buffer_;  // of this turn; empty: not taken yet
  Bytes used_;                   // of it
  std::vector<Block> blocks_;    // to be worked on next
  std::vector<Store> stores_;    // of this turn
  std::deque<Block> later_;      // only to be fingerprinted
  bool complete_ = true;
};

}  // namespace strata::torch
