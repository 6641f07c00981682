#include "strata/device/cuda_update_kernels.h"

#include <fmt/core.h>

#include "strata/kernels/adam_constants.h"

namespace strata::device {
namespace {

constexpr std::int64_t kUpdatePack = 4;  // elements that a thread takes at once
constexpr std::int64_t kByte = 8;        // the same, where a byte holds a bit of each

// As the kernels declare it.
struct AdamArguments {
  float gradient_scale, decay, l2, lerp_weight, beta2, square_weight, correction2_root, eps,
      negative_step_size;
  int lerp_from_gradient;
  int follows_copies;
  const float* late_scale;
};

AdamArguments arguments_from(const kernels::AdamScalars& scalars, bool follows_copies) {
  const kernels::AdamConstants c(scalars);
  return {c.gradient_scale,
          c.decay,
          c.l2,
          c.lerp_weight,
          c.beta2,
          c.square_weight,
          c.correction2_root,
          c.eps,
          c.negative_step_size,
          c.lerp_from_gradient ? 1 : 0,
          follows_copies ? 1 : 0,
          scalars.late_scale};
}

}  // namespace

CudaUpdateKernels::CudaUpdateKernels(const CudaModule& module) : module_(module) {
  for (std::size_t to = 0; to < kKernelTypes; ++to) {
    if (to > 0) adam_[to] = module.find(fmt::format("strata_adam_{}", kKernelSuffixes[to]));
    remainder_[to] = module.find(fmt::format("strata_remainder_{}", kKernelSuffixes[to]));
    adopt_[to] = module.find(fmt::format("strata_adopt_{}", kKernelSuffixes[to]));
  }
  adam_remainder_ = module.find("strata_adam_remainder");
  join_masters_ = module.find("strata_join_masters");
  adam_rounded_ = module.find("strata_adam_rounded_f32");
  adam_rounded16_ = module.find("strata_adam_rounded_bf16");
}

void CudaUpdateKernels::adam(const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars,
                             CUstream stream) const {
  kernels::check_adam(spans, scalars);
  auto count = static_cast<std::int64_t>(spans.gradient.size());
  if (count == 0) return;
  AdamArguments constants = arguments_from(scalars, spans.follows_weight16);
  float* weight = spans.weight.data();
  float* exp_avg = spans.exp_avg.data();
  float* exp_avg_sq = spans.exp_avg_sq.data();
  const float* gradient = spans.gradient.data();
  std::byte* copy = spans.weight16;
  if (spans.has_remainder()) {
    kernels::MasterRemainder remainder = spans.remainder;
    void* arguments[] = {&copy, &remainder, &exp_avg, &exp_avg_sq, &gradient, &count, &constants};
    module_.launch(adam_remainder_, count / kByte + 1, arguments, stream);
    return;
  }
  if (spans.has_moments16()) {
    kernels::Moments16 moments = spans.moments16;
    void* arguments[] = {&copy,     &moments.exp_avg, &moments.exp_avg_sq,
                         &gradient, &count,           &constants};
    module_.launch(adam_rounded16_, count / kUpdatePack + kUpdatePack, arguments, stream);
    return;
  }
  if (spans.rounds_weight16) {
    void* arguments[] = {&copy, &exp_avg, &exp_avg_sq, &gradient, &count, &constants};
    module_.launch(adam_rounded_, count / kUpdatePack + kUpdatePack, arguments, stream);
    return;
  }
  void* arguments[] = {&weight, &exp_avg, &exp_avg_sq, &gradient, &copy, &count, &constants};
  const DType dtype = copy == nullptr ? DType::kFloat32 : spans.weight16_dtype;
  module_.launch(adam_[kernel_place_of(dtype)], count / kUpdatePack + kUpdatePack, arguments,
                 stream);
}

void CudaUpdateKernels::store_remainder(const kernels::MasterRemainder& target, Numel first,
                                        const std::byte* source, DType source_dtype, Numel numel,
                                        CUstream stream) const {
  require_kernel_types("A remainder", 0, DType::kBFloat16, source_dtype);
  if (numel.value == 0) return;
  kernels::MasterRemainder to = target;
  std::int64_t begin = first.value;
  std::int64_t count = numel.value;
  void* arguments[] = {&to, &begin, &source, &count};
  module_.launch(remainder_[kernel_place_of(source_dtype)], count / kByte + 2, arguments, stream);
}

void CudaUpdateKernels::join_masters(std::span<float> masters, const std::byte* weights,
                                     const kernels::MasterRemainder& remainder, Numel first,
                                     CUstream stream) const {
  if (masters.empty()) return;
  float* to = masters.data();
  kernels::MasterRemainder from = remainder;
  std::int64_t begin = first.value;
  std::int64_t count = std::ssize(masters);
  void* arguments[] = {&to, &weights, &from, &begin, &count};
  module_.launch(join_masters_, count, arguments, stream);
}

void CudaUpdateKernels::adopt_written(std::span<float> masters, const std::byte* weights,
                                      DType dtype, CUstream stream) const {
  require_kernel_types("A cast", 0, DType::kFloat32, dtype);
  if (masters.empty()) return;
  float* to = masters.data();
  std::int64_t count = std::ssize(masters);
  void* arguments[] = {&to, &weights, &count};
  module_.launch(adopt_[kernel_place_of(dtype)], count / kUpdatePack + kUpdatePack, arguments,
                 stream);
}

}  // namespace strata::device
