// The sum of squares of gradients, for the global norm: it is finite if and only if all gradients
// are. The factor of clipping and of the loss scale follows from it. Threads: pure functions of
// their span; sum_of_squares() splits the work over `pool` when one is given.
#pragma once

#include <span>

namespace strata {
class ThreadPool;
}

namespace strata::kernels {

// In fp64, in an order that depends on numel alone.
double sum_of_squares(std::span<const float> gradients, ThreadPool* pool);

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
