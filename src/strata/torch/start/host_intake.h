// Values on the host on their way into the engine's weights. Several threads read each byte once:
// they compute the fingerprints by which ranks compare, and copy what this rank keeps into a ring
// of pinned buffers, which the device drains meanwhile. The ring is small enough to stay in the
// processor's cache: what is written to it and read from it costs the memory nothing, and the model
// is read at the memory's speed. Blocks of which only the fingerprint is wanted are read while all
// buffers are full, and in the end: the link waits for none of them. Threads: the engine's, those
// of the pool, and one that leads them. Ownership: borrows all; values until flush(). Work is in
// order with the current stream. Errors: OutOfMemoryError for the buffers, or as the engine's
// memory grows.
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

  // `comparison`: gets the fingerprints; null: nothing is compared any more. `phase` is told what
  // was moved. `at_once`: there is room for all of the engine's weights, so they need not grow unit
  // by unit. `ring`: more than kTaking buffers of at least kBlock.
  HostIntake(engine::Engine& engine, ThreadPool& threads, Comparison* comparison,
             engine::InitReport::Phase& phase, bool at_once,
             const checkpoint::RingOptions& ring = {});

  // Elements of `param` from `begin` on have these values; contiguous. With a comparison it is the
  // whole parameter.
  void add(int param, Numel begin, const at::Tensor& values);
  // Moves what was added. All of it has been read then; the device may still be busy with it.
  // `stored`: called when all that this rank keeps has been stored, while the rest is looked at.
  void flush(const std::function<void()>& stored = {});
  // Whether units that stay whole have been given whole: other ranks' parts were not, here.
  bool complete() const { return complete_; }

 private:
  // The bytes that one thread reads at once.
  struct Block {
    std::span<const std::byte> bytes;  // to fingerprint
    char* fingerprint;                 // null: not wanted
    std::span<const std::byte> kept;   // of them, what goes to the buffer
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
