// Loads the libraries and kernels that torch would load when a model first computes: those of a
// transformer's forward and backward pass. On a GPU loading takes most of the first step, so it
// runs beside a start, which leaves the GPU idle. Threads: any, without Python's lock; work goes to
// the place's default stream. Memory: some megabytes of torch's cache, and memory that its
// libraries keep for themselves. Errors: torch's own; the first step would fail with them, too.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace strata::torch {

// Runs one pass of a tiny block in this floating dtype, and returns when it is over. Draws no
// random numbers.
void warm_up(c10::Device place, c10::ScalarType dtype);

}  // namespace strata::torch
