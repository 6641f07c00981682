// Copies values from the host into the engine's weights. Several threads read each byte once: they
// compute the fingerprints by which ranks compare, and copy this rank's part into a ring of pinned
// buffers, which the device drains meanwhile. The ring is small enough to stay in the processor's
// cache, so its traffic costs no memory bandwidth, and the model is read at the memory's speed.
// Threads read blocks that only need a fingerprint while all buffers are full, and at the end, so
// the link never waits for them. Threads: the engine's, those of the pool, and one that leads them.
// Ownership: borrows all; values until flush(). Work is in order with the current stream. Errors:
// OutOfMemoryError for the buffers, or as the engine's memory grows.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/engine.h"
#include "strata/torch/start/comparison.h"

namespace strata::torch {

class HostIntake {
 public:
  // Buffers that the device reads, or is about to, while threads fill the others.
  static constexpr std::size_t kTaking = 3;

  // `comparison`: gets the fingerprints; null: nothing is compared any more. `phase` records the
  // moved bytes. `at_once`: there is room for all of the engine's weights, so they need not grow
  // unit by unit. `ring`: more than kTaking buffers of at least kBlock.
  HostIntake(engine::Engine& engine, ThreadPool& threads, Comparison* comparison,
             engine::InitReport::Phase& phase, bool at_once,
             const checkpoint::RingOptions& ring = {});

  // Adds the values of `param` from element `begin` on; contiguous. With a comparison they must be
  // the whole parameter.
  void add(int param, Numel begin, const at::Tensor& values);
  // Moves all added values. When it returns, all have been read, but the device may still be
  // copying. `stored`: called when all values that this rank keeps have been stored, before the
  // rest is fingerprinted.
  void flush(const std::function<void()>& stored = {});
  // Whether the units that stay whole have all their values; false if other ranks' parts are
  // missing.
  bool complete() const { return complete_; }

 private:
  // The bytes that one thread reads at once.
  struct Block {
    std::span<const std::byte> bytes;  // to fingerprint
    char* fingerprint;                 // null: not wanted
    std::span<const std::byte> kept;   // the part of them that goes to the buffer
    std::size_t turn;                  // of kept bytes: whose buffer
    std::size_t at;                    // and where in it
  };
  struct Store {
    int param;
    Numel begin;
    Numel count;
    std::size_t at;  // in the buffer
    DType dtype;
  };
  // The blocks that go through one buffer.
  struct Turn {
    std::int64_t blocks = 0;
    std::vector<Store> stores;
    std::size_t used = 0;  // bytes of the buffer
  };
  class Filling;
  class TurnSink;

  void keep(int param, Numel begin, Numel count, Block block, DType dtype);

  engine::Engine& engine_;
  ThreadPool& threads_;
  Comparison* comparison_;
  engine::InitReport::Phase& phase_;
  bool at_once_;
  checkpoint::RingOptions ring_options_;
  std::optional<checkpoint::TransferRing> ring_;  // none until something is kept
  std::vector<Turn> turns_;
  std::vector<Block> blocks_;  // to be kept, in the order of their turns
  std::vector<Block> looks_;   // only to be fingerprinted
  bool complete_ = true;
};

}  // namespace strata::torch
