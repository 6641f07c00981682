#include "strata/plan/channel_order.h"

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
      for (std::size_t column = 0; column < columns; ++column) {
        std::memcpy(target + ((i * columns + column) * rows + row) * sizeof(Element),
                    source + ((i * rows + row) * columns + column) * sizeof(Element),
                    sizeof(Element));
      }
    }
  }
}

void transpose(std::span<std::byte> target, std::span<const std::byte> source, std::size_t count,
               std::size_t rows, std::size_t columns, Bytes element) {
  STRATA_ASSERT(target.size() == source.size() &&
                source.size() == count * rows * columns * element.size());
  switch (element.value) {
    case 1:
      return transpose<std::uint8_t>(target.data(), source.data(), count, rows, columns);
    case 2:
      return transpose<std::uint16_t>(target.data(), source.data(), count, rows, columns);
    case 4:
      return transpose<std::uint32_t>(target.data(), source.data(), count, rows, columns);
    case 8:
      return transpose<std::uint64_t>(target.data(), source.data(), count, rows, columns);
    default:
      STRATA_ASSERT(false);
  }
}

}  // namespace

bool orders_differ(std::span<const std::int64_t> shape) {
  const Sizes sizes = sizes_of(shape);
  return sizes.images > 0 && sizes.channels > 1 && sizes.places > 1;
}

void to_channels_last(std::span<std::byte> target, std::span<const std::byte> source,
                      std::span<const std::int64_t> shape, Bytes element) {
  const Sizes sizes = sizes_of(shape);
  transpose(target, source, sizes.images, sizes.channels, sizes.places, element);
}

void from_channels_last(std::span<std::byte> target, std::span<const std::byte> source,
                        std::span<const std::int64_t> shape, Bytes element) {
  const Sizes sizes = sizes_of(shape);
  transpose(target, source, sizes.images, sizes.places, sizes.channels, element);
}

void reorder(std::span<std::byte> values, std::span<const std::int64_t> shape, Bytes element,
             bool channels_last) {
  const std::vector<std::byte> before(values.begin(), values.end());
  (channels_last ? to_channels_last : from_channels_last)(values, before, shape, element);
}

}  // namespace strata::plan
