// Text of messages about tensors. Names come from files and may be anything: they are shown quoted,
// with control bytes escaped, and cut when long. Pure functions; safe everywhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace strata::format {

// 'model.norm.weight'
std::string in_quotes(std::string_view text);

// [2, 3]
std::string shape_text(std::span<const std::int64_t> shape);

// The first ten, and how many there are beyond: "a, b, ... and 3 more".
std::string first_ten(std::span<const std::string> items);

}  // namespace strata::format
