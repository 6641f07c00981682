#include "strata/plan/param_spec.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstring>

#include "strata/base/error.h"

namespace strata::plan {
namespace {

struct Sizes {
  std::size_t images = 1;
  std::size_t channels = 1;
  std::size_t places = 1;  // the product of the spatial dimensions
};

Sizes sizes_of(std::span<const std::int64_t> shape) {
  Sizes sizes;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    std::size_t& size = i == 0 ? sizes.images : i == 1 ? sizes.channels : sizes.places;
    size *= static_cast<std::size_t>(shape[i]);
  }
  return sizes;
}

// Turns each of `count` matrices [rows, columns] into [columns, rows].
template <typename Element>
void transpose(std::byte* target, const std::byte* source, std::size_t count, std::size_t rows,
               std::size_t columns) {
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t column = 0; column < columns; ++column)
        std::memcpy(target + ((i * columns + column) * rows + row) * sizeof(Element),
                    source + ((i * rows + row) * columns + column) * sizeof(Element),
                    sizeof(Element));
    }
  }
}

// Matrix products like their sizes round; what they lose by a tile that is not may exceed what one
// tile more costs.
constexpr std::int64_t kRoundRows = 128;

std::int64_t parts_of(std::int64_t all, std::int64_t each) {
  return (all + each - 1) / each;
}

void require_row_fits(std::string_view name, std::int64_t rows, Bytes row, Bytes most) {
  if (row <= most) return;
  throw ConfigError(
      "strata.tiles.max_gather: a tile of '{}' holds one row at least; give {} or more; found {} "
      "for {} rows of {} bytes",
      name, row.value, most.value, rows, row.value);
}

}  // namespace

bool orders_differ(std::span<const std::int64_t> shape) {
  const Sizes sizes = sizes_of(shape);
  return sizes.images > 0 && sizes.channels > 1 && sizes.places > 1;
}

void reorder(std::span<std::byte> values, std::span<const std::int64_t> shape, Bytes element,
             bool channels_last) {
  const std::vector<std::byte> before(values.begin(), values.end());
  const Sizes sizes = sizes_of(shape);
  const std::size_t rows = channels_last ? sizes.channels : sizes.places;
  const std::size_t columns = channels_last ? sizes.places : sizes.channels;
  STRATA_ASSERT(before.size() == sizes.images * rows * columns * element.size());
  const auto turn = [&]<typename Element>(Element) {
    transpose<Element>(values.data(), before.data(), sizes.images, rows, columns);
  };
  switch (element.value) {
    case 1:
      return turn(std::uint8_t{});
    case 2:
      return turn(std::uint16_t{});
    case 4:
      return turn(std::uint32_t{});
    case 8:
      return turn(std::uint64_t{});
    default:
      STRATA_ASSERT(false);
  }
}

std::vector<RowRange> cut_rows(std::string_view name, std::int64_t rows, Bytes row, Bytes most) {
  require_row_fits(name, rows, row, most);
  std::vector<RowRange> tiles;
  if (rows == 0) return tiles;
  const std::int64_t fitting = row.value == 0 ? rows : most.value / row.value;
  std::int64_t each = parts_of(rows, parts_of(rows, std::min(fitting, rows)));
  const std::int64_t rounded = parts_of(each, kRoundRows) * kRoundRows;
  if (rounded <= fitting) each = rounded;
  for (std::int64_t begin = 0; begin < rows; begin += each)
    tiles.push_back({begin, std::min(begin + each, rows)});
  return tiles;
}

void require_tiles(std::string_view name, std::int64_t rows, Bytes row, Bytes most,
                   std::span<const RowRange> tiles) {
  const auto refuse = [&](std::string_view what, const RowRange& tile) {
    throw ConfigError(
        "the tiling rule of '{}' must hold each of its {} rows in one tile, in order, in tiles of "
        "at most {} bytes; found that {}: rows {} to {} of {} bytes each",
        name, rows, most.value, what, tile.begin, tile.end, row.value);
  };
  require_row_fits(name, rows, row, most);
  std::int64_t next = 0;
  for (const RowRange& tile : tiles) {
    if (tile.begin < next) refuse("tiles overlap, or are not in order", tile);
    if (tile.begin > next) refuse(fmt::format("rows from {} on are in no tile before", next), tile);
    if (tile.end <= tile.begin) refuse("a tile is empty", tile);
    if (tile.end > rows) refuse("a tile ends behind the last row", tile);
    if (row * (tile.end - tile.begin) > most) refuse("a tile is larger", tile);
    next = tile.end;
  }
  if (next < rows) refuse("the last rows are in no tile", {next, rows});
}

bool wants_tiles(const std::string& name, Bytes bytes, Bytes most,
                 std::span<const std::string> patterns) {
  if (bytes <= most) return false;
  return patterns.empty() || std::ranges::any_of(patterns, [&](const std::string& pattern) {
           return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
         });
}

}  // namespace strata::plan
