#include "strata/plan/param_spec.h"

#include <cstring>
#include <vector>

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

}  // namespace strata::plan
