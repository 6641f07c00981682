#include "strata/format/tensor_info.h"

namespace strata::format {

std::optional<Numel> checked_numel(std::span<const std::int64_t> shape) {
  std::int64_t product = 1;
  bool empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) return std::nullopt;
    if (dimension == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(product, dimension, &product)) {
      return std::nullopt;
    }
  }
  return Numel(empty ? 0 : product);
}

std::optional<Bytes> checked_bytes(Numel numel, DType dtype) {
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(numel.value, size_of(dtype).value, &bytes)) return std::nullopt;
  return Bytes(bytes);
}

}  // namespace strata::format
