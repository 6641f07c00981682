// Values of the device on their way to ordinary host memory: through a ring of pinned buffers that
// the device fills while several threads empty those before, which is also when the memory's pages
// are first touched. Threads: the engine's, and those of the pool. Ownership: borrows all; sources
// and targets until flush(). Work is in order with the current stream. Errors: OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <span>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/engine/checkpoint/staging_ring.h"
#include "strata/engine/engine.h"

namespace strata::torch {

// A tensor on the host like this one, contiguous, contents undefined; in huge pages where it is
// large, which are faster to come by.
at::Tensor empty_on_host(const at::Tensor& like);

class HostExport {
 public:
  // `phase` is told what was moved.
  HostExport(engine::Engine& engine, ThreadPool& threads, engine::InitReport::Phase& phase);

  // Of one length.
  void add(std::span<std::byte> target, std::span<const std::byte> source);
  // All that was added is there.
  void flush();

 private:
  struct Part {
    std::span<std::byte> target;
    const std::byte* source;  // in the buffer
  };
  struct Turn {
    std::vector<Part> parts;
    std::unique_ptr<device::Event> arrived;
  };

  void close();
  void empty_oldest();

  engine::Engine& engine_;
  ThreadPool& threads_;
  engine::InitReport::Phase& phase_;
  engine::StagingRing ring_;
  std::size_t turn_ = 0;
  std::span<std::byte> buffer_;  // of this turn; empty: not taken yet
  Bytes used_;                   // of it
  std::vector<Part> parts_;      // of this turn
  std::deque<Turn> under_way_;
};

}  // namespace strata::torch
