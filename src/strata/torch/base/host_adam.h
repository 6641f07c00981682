// Adam and AdamW over torch tensors in host memory, computed by this rank's threads. Optimizers
// that run without an engine use it. Tensors need not be contiguous: if a tensor's elements lie in
// another order than its parameter's, the update works on a copy and writes the result back.
// Threads: one at a time. Ownership: it owns its threads, which it starts in the first step.
// Errors: UsageError for tensors that it cannot update, before it writes anything.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/kernels/adam.h"

namespace strata::torch {

// The tensors of one parameter. All have one shape and are float32, bfloat16 or float16; both
// moments have the same dtype.
struct HostAdamTensors {
  at::Tensor weight;
  at::Tensor gradient;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  std::int64_t step = 1;  // of this update, counted from 1
};

class HostAdam {
 public:
  // `world_size`: the number of ranks, which decides the number of threads (host_threads.h). Starts
  // no thread yet.
  explicit HostAdam(int world_size);

  int threads() const { return threads_; }
  // Takes all of `scalars` except their step. Autograd does not record the update, but it sees that
  // the weights have changed.
  void step(const std::vector<HostAdamTensors>& parameters, const kernels::AdamScalars& scalars);

 private:
  int threads_;
  std::optional<ThreadPool> pool_;
};

}  // namespace strata::torch
