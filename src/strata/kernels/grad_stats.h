// What a step must know about gradients before it may use them: the sum of squares for the global
// norm, and whether all are finite. One pass.
// Threads: pure functions of their span; grad_stats splits the work over `pool` when one is given.
#pragma once

#include <span>

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

struct GradStats {
  double sum_of_squares = 0.0;  // accumulated in fp64, in an order that depends on numel alone
  bool finite = true;           // no NaN and no infinity
};

GradStats grad_stats(std::span<const float> gradients, ThreadPool* pool);

// The readable reference: a plain loop with the same bits.
GradStats grad_stats_reference(std::span<const float> gradients);

}  // namespace strata::kernels
