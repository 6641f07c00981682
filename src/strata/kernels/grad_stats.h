// What a step must know about gradients before it may use them: the sum of squares for the global norm,
// and whether all are finite. One pass.
#pragma once

#include <span>

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

struct GradStats {
  double sum_of_squares = 0.0;  // accumulated in fp64, in an order that does not depend on threads
  bool finite = true;           // no NaN and no infinity
};

GradStats grad_stats(std::span<const float> gradients, ThreadPool* pool);
GradStats grad_stats_reference(std::span<const float> gradients);

}  // namespace strata::kernels
