// The two orders of the elements of a convolution's weight [N, C, spatial dimensions]: that of its
// dimensions, and channels_last, in which C is the innermost. Files of weights have the first;
// the slot of a parameter with ParamSpec::channels_last has the second. Pure functions.
// Threads: any. Errors: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "strata/base/units.h"

namespace strata::plan {

// Whether the two orders of a tensor of this shape differ.
bool orders_differ(std::span<const std::int64_t> shape);

// Copies a whole tensor from one order to the other. Both spans have its bytes; they do not
// overlap. `element`: 1, 2, 4 or 8.
void to_channels_last(std::span<std::byte> target, std::span<const std::byte> source,
                      std::span<const std::int64_t> shape, Bytes element);
void from_channels_last(std::span<std::byte> target, std::span<const std::byte> source,
                        std::span<const std::int64_t> shape, Bytes element);
// The same, in place.
void reorder(std::span<std::byte> values, std::span<const std::int64_t> shape, Bytes element,
             bool channels_last);

}  // namespace strata::plan
