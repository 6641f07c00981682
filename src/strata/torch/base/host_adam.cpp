#include "strata/torch/base/host_adam.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/kernels/adam.h"
#include "strata/torch/base/dtype.h"
#include "strata/torch/base/host_threads.h"

namespace strata::torch {
namespace {

void check_adam_tensors(const HostAdamTensors& p) {
  if (p.exp_avg.scalar_type() != p.exp_avg_sq.scalar_type()) {
    throw UsageError(fmt::format("both moments of a parameter are of one type; found {} and {}",
                                 c10::toString(p.exp_avg.scalar_type()),
                                 c10::toString(p.exp_avg_sq.scalar_type())));
  }
  for (const at::Tensor& tensor : {p.weight, p.gradient, p.exp_avg, p.exp_avg_sq}) {
    if (!tensor.device().is_cpu() || tensor.layout() != c10::kStrided) {
      throw UsageError(
          fmt::format("Adam on the host updates dense tensors in host memory; found one on {}, {}",
                      tensor.device().str(), tensor.is_sparse() ? "sparse" : "dense"));
    }
    if (!tensor.sizes().equals(p.weight.sizes())) {
      throw UsageError(fmt::format(
          "a parameter, its gradient and its moments have one shape; load states that belong to "
          "this parameter; found {} elements and {}",
          p.weight.numel(), tensor.numel()));
    }
  }
}

// Tensors whose elements lie in one order: each is the original, or a copy.
class AlignedTensors {
 public:
  explicit AlignedTensors(const HostAdamTensors& original) : original_(original), used_(original) {
    used_.weight = original.weight.detach();
    if (!original.weight.is_non_overlapping_and_dense())
      used_.weight = original.weight.detach().contiguous();
    used_.gradient = as_weight(original.gradient);
    used_.exp_avg = as_weight(original.exp_avg);
    used_.exp_avg_sq = as_weight(original.exp_avg_sq);
  }

  kernels::AdamTensor tensor() const {
    const auto bytes = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
    return {.weight = bytes(used_.weight),
            .weight_dtype = from_scalar_type(used_.weight.scalar_type()),
            .exp_avg = bytes(used_.exp_avg),
            .exp_avg_sq = bytes(used_.exp_avg_sq),
            .moment_dtype = from_scalar_type(used_.exp_avg.scalar_type()),
            .gradient = bytes(used_.gradient),
            .gradient_dtype = from_scalar_type(used_.gradient.scalar_type()),
            .numel = Numel(used_.weight.numel()),
            .step = used_.step};
  }

  void write_back() const {
    write_back(original_.exp_avg, used_.exp_avg);
    write_back(original_.exp_avg_sq, used_.exp_avg_sq);
    if (used_.weight.is_alias_of(original_.weight)) {
      original_.weight.unsafeGetTensorImpl()->bump_version();
    } else {
      original_.weight.copy_(used_.weight);
    }
  }

 private:
  at::Tensor as_weight(const at::Tensor& tensor) const {
    if (tensor.strides().equals(used_.weight.strides())) return tensor.detach();
    at::Tensor copy = at::empty_like(used_.weight, tensor.options());
    copy.copy_(tensor);
    return copy;
  }
  static void write_back(const at::Tensor& original, const at::Tensor& used) {
    if (!used.is_alias_of(original)) original.copy_(used);
  }

  const HostAdamTensors& original_;
  HostAdamTensors used_;
};

}  // namespace

HostAdam::HostAdam(int world_size) : threads_(host_threads(std::nullopt, world_size)) {}

void HostAdam::step(const std::vector<HostAdamTensors>& parameters,
                    const kernels::AdamScalars& scalars) {
  const at::NoGradGuard no_graph;
  for (const HostAdamTensors& parameter : parameters) check_adam_tensors(parameter);
  std::vector<AlignedTensors> aligned;
  std::vector<kernels::AdamTensor> tensors;
  for (const HostAdamTensors& parameter : parameters) aligned.emplace_back(parameter);
  for (const AlignedTensors& parameter : aligned) tensors.push_back(parameter.tensor());
  if (!pool_) pool_.emplace(threads_, host_cores(threads_));
  kernels::adam_step(tensors, scalars, &*pool_);
  for (const AlignedTensors& parameter : aligned) parameter.write_back();
}

}  // namespace strata::torch
