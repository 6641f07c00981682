// Copies values from the device to ordinary host memory, through a ring of pinned buffers. The
// device fills one buffer while several threads empty earlier ones, and thereby touch the pages of
// the target for the first time. Threads: the engine's, and those of the pool. Ownership: borrows
// all; sources and targets until flush(). Work is in order with the current stream. Errors:
// OutOfMemoryError.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/checkpoint/pipeline.h"
#include "strata/engine/engine.h"

namespace strata::torch {

// A contiguous tensor like this one on the host, with undefined contents. A large one lies in huge
// pages, which the system provides faster.
at::Tensor empty_on_host(const at::Tensor& like);

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
