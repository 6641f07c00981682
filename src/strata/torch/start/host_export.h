// Values of the device on their way to ordinary host memory: through a ring of pinned buffers that
// the device fills while several threads empty those before, which is also when the memory's pages
// are first touched. Threads: the engine's, and those of the pool. Ownership: borrows all; sources
// and targets until flush(). Work is in order with the current stream. Errors: OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/engine.h"

namespace strata::torch {

// A tensor on the host like this one, contiguous, contents undefined; in huge pages where it is
// large, which are faster to come by.
at::Tensor empty_on_host(const at::Tensor& like);

class HostExport {
 public:
  // `phase` is told what was moved.
  HostExport(engine::Engine& engine, ThreadPool& threads, engine::InitReport::Phase& phase);

  // Both have one length.
  void add(std::span<std::byte> target, std::span<const std::byte> source);
  // All that was added is there.
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
  std::vector<std::vector<Part>> turns_;  // what goes through one buffer
};

}  // namespace strata::torch
