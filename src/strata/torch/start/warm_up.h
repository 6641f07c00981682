// Loads beforehand what torch loads when a model first computes: the libraries and kernels of a
// transformer's forward and backward pass. On a GPU that takes most of the first step, so it is run
// beside a start that has the GPU idle. Threads: any, without Python's lock; work goes to the
// place's default stream. Memory: some megabytes of torch's cache, and what its libraries keep for
// themselves. Errors: torch's own, of what the first step would fail at, too.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace strata::torch {

// One pass of a tiny block in this floating dtype; over when it returns. Draws no random numbers.
void warm_up(c10::Device place, c10::ScalarType dtype);

}  // namespace strata::torch
