// Copies a live model's values between the host and the engine's device, through a ring of pinned
// buffers: the Sources and Sinks of checkpoint/pipeline.h. Work is in order with the current
// stream. Threads: the engine's, and those of the pool. Ownership: borrows all; sources, values and
// targets until flush(). Errors: OutOfMemoryError for the buffers, or as the engine's memory grows.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/engine.h"
#include "strata/torch/start/comparison.h"

namespace strata::torch {

// Copies values from the host into the engine's weights. Several threads read each byte once: they
// compute the fingerprints by which ranks compare, and copy this rank's part into a ring of pinned
// buffers, which the device drains meanwhile. The ring is small enough to stay in the processor's
// cache, so its traffic costs no memory bandwidth, and the model is read at the memory's speed.
// Threads read blocks that only need a fingerprint while all buffers are full, and at the end, so
// the link never waits for them. One more thread leads those of the pool.
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

// A contiguous tensor like this one on the host, with undefined contents. A large one lies in huge
// pages, which the system provides faster.
at::Tensor empty_on_host(const at::Tensor& like);

// Copies values from the device to ordinary host memory, through a ring of pinned buffers. The
// device fills one buffer while several threads empty earlier ones, and thereby touch the pages of
// the target for the first time.
class HostExport {
 public:
  // Records the moved bytes in `phase`.
  HostExport(engine::Engine& engine, ThreadPool& threads, engine::InitReport::Phase& phase);

  // Both spans have the same length.
  void add(std::span<std::byte> target, std::span<const std::byte> source);
  // Returns when all that was added has been copied.
  void flush();

 private:
  struct Part {
    std::span<std::byte> target;
    std::span<const std::byte> source;
    std::size_t at;  // in the buffer
  };
  class PartSource;
  class PartSink;

  engine::Engine& engine_;
  ThreadPool& threads_;
  engine::InitReport::Phase& phase_;
  checkpoint::TransferRing ring_;
  std::vector<std::vector<Part>> turns_;  // the parts that go through one buffer
};

}  // namespace strata::torch
