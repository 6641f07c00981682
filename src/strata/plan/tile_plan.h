// Tiles: rows of one parameter that are gathered, used and reduced on their own, if the whole
// parameter is larger than one gather may be. A row is one element of the first dimension: an
// output of a linear layer, a token of an embedding, an expert of a fused weight. So a tile is a
// range of the parameter's elements, in files, in checkpoints and in memory. Pure arithmetic.
// Errors: ConfigError, with the name and the numbers.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "strata/base/units.h"

namespace strata::plan {

struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  auto operator<=>(const RowRange&) const = default;
};

// Cuts `rows` rows of `row` bytes each into the fewest tiles of at most `most` bytes, all of one
// size except the last, so that one tile's memory serves the next. `name`: the parameter's. Errors:
// a row exceeds `most`.
std::vector<RowRange> cut_rows(std::string_view name, std::int64_t rows, Bytes row, Bytes most);

// Checks tiles that the caller has cut. Throws unless they hold every row once, in order, none is
// empty, and none exceeds `most`.
void require_tiles(std::string_view name, std::int64_t rows, Bytes row, Bytes most,
                   std::span<const RowRange> tiles);

// Whether the settings cut this parameter into tiles: it exceeds `most`, and one of the patterns
// names it (as a shell's do), or there are no patterns.
bool wants_tiles(const std::string& name, Bytes bytes, Bytes most,
                 std::span<const std::string> patterns);

}  // namespace strata::plan
