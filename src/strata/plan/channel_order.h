// The two orders of the elements of a convolution's weight [N, C, spatial dimensions]: that of its
// dimensions, and channels_last, in which C is the innermost. Files of weights have the first;
// the slot of a parameter with ParamSpec::channels_last has the second. Pure functions.
// Threads: any. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "strata/base/units.h"

namespace strata::plan {

// Whether the two orders of a tensor of this shape differ.
bool orders_differ(std::span<const std::int64_t> shape);

// Brings a whole tensor to the one order or the other, in place. `element`: 1, 2, 4 or 8.
void reorder(std::span<std::byte> values, std::span<const std::int64_t> shape, Bytes element,
             bool channels_last);

}  // namespace strata::plan
