#include "strata/base/error.h"
#include "strata/kernels/elementwise.h"
#include "strata/kernels/recipe_scalars.h"

namespace strata::kernels {

void check_replay(DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
    throw UsageError(fmt::format(
        "values are replayed in float32, bfloat16 and float16; make others real; found: {}",
        name_of(dtype)));
  }
}

void replay_reference(std::span<const RecipeStep> recipe, Numel begin, Numel numel,
                      std::byte* target, DType dtype) {
  check_replay(dtype);
  for (Numel i; i < numel; i += Numel(1)) {
    const std::int64_t index = (begin + i).value;
    float value = 0.0F;
    for (const RecipeStep& step : recipe) {
      for_each_run(step.region, index, index + 1, [&](std::int64_t first, std::int64_t last) {
        apply_scalars(step, first, last, &value);
      });
    }
    cast_reference(target + bytes_of(i, dtype).size(), dtype,
                   reinterpret_cast<const std::byte*>(&value), DType::kFloat32, Numel(1));
  }
}

}  // namespace strata::kernels
