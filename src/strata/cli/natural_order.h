// The order in which people count: "layers.9" before "layers.10". Pure; safe everywhere.
#pragma once

#include <string_view>

namespace strata::cli {

// A strict weak order, total on texts without leading zeros in their numbers.
struct NaturalLess {
  using is_transparent = void;
  bool operator()(std::string_view a, std::string_view b) const;
};

}  // namespace strata::cli
