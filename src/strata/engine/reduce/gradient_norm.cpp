#include "strata/engine/reduce/gradient_norm.h"

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "strata/base/error.h"

namespace strata::engine {

using kernels::GradientFactor;

bool GradientNorm::available() const {
  return shards_.dtype() == DType::kFloat32 &&
         (collectives_.world_size() == 1 || collectives_.traits().gathers_on_device);
}

GradientNorm::Values GradientNorm::values() const {
  const std::span<std::byte> bytes = memory_->bytes();
  const auto ranks = static_cast<std::size_t>(collectives_.world_size());
  auto* const factors = reinterpret_cast<GradientFactor*>(bytes.data());
  auto* const doubles = reinterpret_cast<double*>(factors + 2);
  return {{doubles + ranks, shards_.count()}, {doubles, ranks}, factors, factors + 1};
}

void GradientNorm::begin(double loss_scale, double clipping) {
  STRATA_ASSERT(available() && !begun());
  loss_scale_ = loss_scale;
  if (memory_ == nullptr) {
    const std::size_t doubles =
        shards_.count() + static_cast<std::size_t>(collectives_.world_size());
    memory_ = device_.allocate(Bytes(2 * sizeof(GradientFactor) + doubles * sizeof(double)),
                               memory::Kind::kStaging);
    host_ = device_.allocate_host(Bytes(sizeof(GradientFactor)), memory::Kind::kStaging);
  }
  device::Stream& stream = device_.compute_stream();
  const Values v = values();
  // Kept, since the next backward pass writes where the shards have theirs.
  device_.copy(std::as_writable_bytes(v.by_unit), std::as_bytes(shards_.squares()), stream);
  if (collectives_.world_size() == 1) {
    device_.gradient_factor(*v.result, v.by_unit, loss_scale, clipping, stream);
  } else {
    device_.gradient_factor(*v.mine, v.by_unit, loss_scale, clipping, stream);
    collectives_.all_gather_on_device(std::as_writable_bytes(v.by_rank),
                                      std::as_bytes(std::span(&v.mine->sum_of_squares, 1)));
    device_.gradient_factor(*v.result, v.by_rank, loss_scale, clipping, stream);
  }
  device_.copy(host_->bytes().first(sizeof(GradientFactor)), std::as_bytes(std::span(v.result, 1)),
               stream);
  computed_ = stream.record();
}

GradientNorm::Finding GradientNorm::finish() {
  STRATA_ASSERT(begun());
  std::exchange(computed_, nullptr)->wait();
  GradientFactor result;
  std::memcpy(&result, host_->bytes().data(), sizeof(result));
  return {kernels::norm_of(result.sum_of_squares, loss_scale_), !std::isnan(result.factor)};
}

int GradientNorm::first_not_finite() {
  std::vector<double> sums(shards_.count());
  device::Stream& stream = device_.compute_stream();
  device_.copy(std::as_writable_bytes(std::span(sums)), std::as_bytes(values().by_unit), stream);
  stream.synchronize();
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (!std::isfinite(sums[i])) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace strata::engine
