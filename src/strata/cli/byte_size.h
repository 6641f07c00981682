// Sizes as people write them on a command line: "5GB" (10^9 bytes), "80GiB" (2^30), "4096". Pure;
// safe everywhere. Errors: UsageError that names the option.
#pragma once

#include <string_view>

#include "strata/base/units.h"

namespace strata::cli {

// Positive; a fraction is allowed where there is a unit ("1.5TiB"). Letters may be of either case.
Bytes parse_byte_size(std::string_view text, std::string_view option);

}  // namespace strata::cli
