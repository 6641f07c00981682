#include "strata/kernels/adam.h"

#include <algorithm>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/kernels/widened.h"

namespace strata::kernels {
namespace {

void require_adam_type(DType dtype, const char* what) {
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) return;
  throw UsageError(
      "Adam on the host updates float32, bfloat16 and float16; convert the parameter; found {} of "
      "{}",
      what, name_of(dtype));
}

template <typename Byte>
Byte* from_element(Byte* array, DType dtype, std::int64_t element) {
  return array + size_of(dtype).value * element;
}

// At most kWidened elements, unless all are fp32.
void update_piece(const AdamTensor& tensor, const UpdateScalars& scalars, std::int64_t begin,
                  std::int64_t end) {
  WidenedPiece weights;  // filled where they are used
  WidenedPiece first;
  WidenedPiece second;
  WidenedPiece gradients;
  const Numel numel(end - begin);
  const DType moment = tensor.moment_dtype;
  std::byte* const weight = from_element(tensor.weight, tensor.weight_dtype, begin);
  std::byte* const exp_avg = from_element(tensor.exp_avg, moment, begin);
  std::byte* const exp_avg_sq = from_element(tensor.exp_avg_sq, moment, begin);
  UpdateSpans spans{.weight = in_fp32(weight, tensor.weight_dtype, numel, weights),
                    .exp_avg = in_fp32(exp_avg, moment, numel, first),
                    .exp_avg_sq = in_fp32(exp_avg_sq, moment, numel, second),
                    .gradient = in_fp32(from_element(tensor.gradient, tensor.gradient_dtype, begin),
                                        tensor.gradient_dtype, numel, gradients)};
  if (tensor.weight_dtype != DType::kFloat32) {
    spans.weight16 = weight;
    spans.weight16_dtype = tensor.weight_dtype;
  }
  update_step(spans, scalars, nullptr);
  if (moment == DType::kFloat32) return;
  const auto* const new_first = reinterpret_cast<const std::byte*>(first.data());
  const auto* const new_second = reinterpret_cast<const std::byte*>(second.data());
  cast(exp_avg, moment, new_first, DType::kFloat32, numel, nullptr);
  cast(exp_avg_sq, moment, new_second, DType::kFloat32, numel, nullptr);
}

void update_chunk(const AdamTensor& tensor, UpdateScalars scalars, std::int64_t begin) {
  scalars.step = tensor.step;
  const std::int64_t end = std::min(begin + kUpdateGrain, tensor.numel.value);
  const bool widens = tensor.weight_dtype != DType::kFloat32 ||
                      tensor.moment_dtype != DType::kFloat32 ||
                      tensor.gradient_dtype != DType::kFloat32;
  const std::int64_t piece = widens ? kWidened : kUpdateGrain;
  for (std::int64_t i = begin; i < end; i += piece)
    update_piece(tensor, scalars, i, std::min(i + piece, end));
}

}  // namespace

void adam_step(std::span<const AdamTensor> tensors, const UpdateScalars& scalars,
               ThreadPool* pool) {
  STRATA_ASSERT(scalars.late_scale == nullptr);
  std::vector<std::int64_t> ends;  // of each tensor's chunks, all counted through
  std::int64_t chunks = 0;
  for (const AdamTensor& tensor : tensors) {
    require_adam_type(tensor.weight_dtype, "a parameter");
    require_adam_type(tensor.moment_dtype, "a moment");
    require_adam_type(tensor.gradient_dtype, "a gradient");
    STRATA_ASSERT(tensor.step >= 1);
    chunks += (tensor.numel.value + kUpdateGrain - 1) / kUpdateGrain;
    ends.push_back(chunks);
  }
  for_chunks(pool, chunks, 1, [&](std::int64_t chunk, std::int64_t) {
    const auto i = static_cast<std::size_t>(std::ranges::upper_bound(ends, chunk) - ends.begin());
    const std::int64_t before = i == 0 ? 0 : ends[i - 1];
    update_chunk(tensors[i], scalars, (chunk - before) * kUpdateGrain);
  });
}

}  // namespace strata::kernels
