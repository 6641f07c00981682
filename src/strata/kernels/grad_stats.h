// A step needs two facts about gradients before it may use them: the sum of squares for the global
// norm, and whether all are finite. One pass finds both. The factor of clipping and of the loss
// scale follows from them.
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

// The factor by which an update multiplies its gradients.
struct GradientFactor {
  double sum_of_squares = 0.0;  // over all gradients; not finite where one of them is not
  float factor = 1.0F;          // NaN: no update
};

// `sums`: of squares, added up in their order. The gradients were made of a loss times `loss_scale`
// and their global norm is clipped to `clipping`; 0: it is not.
GradientFactor gradient_factor(std::span<const double> sums, double loss_scale, double clipping);
double norm_of(double sum_of_squares, double loss_scale);
// The factor that clipping and the loss scale give for gradients of this norm.
float scale_of(double norm, double loss_scale, double clipping);

}  // namespace strata::kernels
