// Adam and AdamW over torch tensors in host memory, by this rank's threads: for optimizers that run
// without an engine. Tensors need not be contiguous: those whose elements lie in another order than
// their parameter's are copied for the update, and what it changes is copied back.
// Threads: one at a time. Ownership: its threads are its own, from the first step on. Errors:
// UsageError for what it cannot update, before anything is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/kernels/adam.h"

namespace strata::torch {

// Of one parameter: tensors of one shape; float32, bfloat16 or float16, both moments the same.
struct HostAdamTensors {
  at::Tensor weight;
  at::Tensor gradient;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  std::int64_t step = 1;  // of this update, counted from 1
};

class HostAdam {
 public:
  // Of a rank among `world_size` (host_threads.h). Starts no thread yet.
  explicit HostAdam(int world_size);

  int threads() const { return threads_; }
  // `scalars` but for their step. Autograd does not see the update, but that weights have changed.
  void step(const std::vector<HostAdamTensors>& parameters, const kernels::AdamScalars& scalars);

 private:
  int threads_;
  std::optional<ThreadPool> pool_;
};

}  // namespace strata::torch
