#include "strata/base/error.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/elementwise_loops.h"

namespace strata::kernels {
namespace {

[[noreturn]] void throw_unsupported(const char* operation, const char* types, DType found) {
  throw UsageError(fmt::format("{} is defined for {}; cast other tensors before; found: {}",
                               operation, types, name_of(found)));
}

bool is_summable(DType dtype) {
  return is_floating(dtype) && dtype != DType::kFloat64;
}

}  // namespace

void check_cast(DType target, DType source) {
  for (const DType dtype : {target, source}) {
    if (!is_floating(dtype)) {
      throw_unsupported("A cast", "float64, float32, float16 and bfloat16", dtype);
    }
  }
}

void check_accumulate(DType target, DType source) {
  for (const DType dtype : {target, source}) {
    if (!is_summable(dtype)) {
      throw_unsupported("Accumulation", "float32, float16 and bfloat16", dtype);
    }
  }
}

void check_sum(std::size_t sources, DType dtype) {
  STRATA_ASSERT(sources > 0);
  if (!is_summable(dtype)) {
    throw_unsupported("A sum over ranks", "float32, float16 and bfloat16", dtype);
  }
}

void cast_reference(std::byte* target, DType target_dtype, const std::byte* source,
                    DType source_dtype, Numel numel) {
  check_cast(target_dtype, source_dtype);
  if (target_dtype == source_dtype) {
    const std::size_t bytes = bytes_of(numel, target_dtype).size();
    if (bytes > 0) std::memcpy(target, source, bytes);
    return;
  }
  with_wide_storage(target_dtype, [&](auto to) {
    with_wide_storage(source_dtype, [&](auto from) {
      cast_scalars<decltype(to), decltype(from)>(target, source, 0, numel.size());
    });
  });
}

void accumulate_reference(std::byte* target, DType target_dtype, const std::byte* source,
                          DType source_dtype, Numel numel) {
  check_accumulate(target_dtype, source_dtype);
  with_storage(target_dtype, [&](auto to) {
    with_storage(source_dtype, [&](auto from) {
      accumulate_scalars<decltype(to), decltype(from)>(target, source, 0, numel.size());
    });
  });
}

void sum_in_order_reference(std::span<float> target, std::span<const std::byte* const> sources,
                            DType dtype, float scale, bool accumulate) {
  check_sum(sources.size(), dtype);
  const SumTask task{target.data(), sources, scale, accumulate};
  with_storage(dtype, [&](auto from) { sum_scalars<decltype(from)>(task, 0, target.size()); });
}

void adopt_written_reference(std::span<float> masters, const std::byte* weights, DType dtype) {
  check_cast(DType::kFloat32, dtype);
  with_wide_storage(dtype, [&](auto from) {
    adopt_scalars<decltype(from)>(masters.data(), weights, 0, masters.size());
  });
}

}  // namespace strata::kernels
