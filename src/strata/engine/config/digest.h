// Compares digests of configurations (Config::digest()), so that ranks can name the differences.
// Pure functions.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace strata::engine {

struct Difference {
  std::string path;
  std::string left;  // its value, or "not set"
  std::string right;

  bool operator==(const Difference&) const = default;
};

// The first path, in sorted order, whose values differ; nothing when the digests are equal.
std::optional<Difference> first_difference(std::string_view left, std::string_view right);

}  // namespace strata::engine
