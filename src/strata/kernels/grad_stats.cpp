#include "strata/kernels/grad_stats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/kernels/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "strata/kernels/grad_stats.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "strata/kernels/lanes-inl.h"

// The order of summation, the same on every machine: chunks of kChunk elements; within a chunk,
// element i goes to the partial sum i % kLanes; partial sums are added pairwise; chunks in their
// order. Squares of fp32 numbers are exact in fp64, so fused or not makes no difference.
#ifndef STRATA_KERNELS_GRAD_STATS_ORDER_
#define STRATA_KERNELS_GRAD_STATS_ORDER_
namespace strata::kernels {
namespace {

constexpr std::size_t kLanes = 32;
constexpr std::size_t kChunk = 65536;

using PartialSums = std::array<double, kLanes>;

void add_scalars(PartialSums& sums, std::span<const float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = static_cast<double>(values[i]);
    sums[i % kLanes] += value * value;
  }
}

double total_of(PartialSums& sums) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  }
  return sums[0];
}

}  // namespace
}  // namespace strata::kernels
#endif  // STRATA_KERNELS_GRAD_STATS_ORDER_

HWY_BEFORE_NAMESPACE();
namespace strata::kernels::HWY_NAMESPACE {

double chunk_sum(std::span<const float> values) {
  PartialSums sums{};
  std::size_t body = 0;
#if STRATA_KERNELS_HAVE_LANES
  const hn::CappedTag<double, kLanes> d;
  const hn::Rebind<float, decltype(d)> narrow;
  constexpr std::size_t kWidth = hn::MaxLanes(d);
  constexpr std::size_t kVectors = kLanes / kWidth;
  hn::Vec<decltype(d)> vectors[kVectors];
  for (std::size_t k = 0; k < kVectors; ++k) vectors[k] = hn::Zero(d);
  body = values.size() - values.size() % kLanes;
  for (std::size_t i = 0; i < body; i += kLanes) {
    for (std::size_t k = 0; k < kVectors; ++k) {
      const auto value = hn::PromoteTo(d, hn::LoadU(narrow, values.data() + i + k * kWidth));
      vectors[k] = hn::MulAdd(value, value, vectors[k]);
    }
  }
  for (std::size_t k = 0; k < kVectors; ++k) hn::StoreU(vectors[k], d, sums.data() + k * kWidth);
#endif
  add_scalars(sums, values.subspan(body));
  return total_of(sums);
}

}  // namespace strata::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace strata::kernels {

HWY_EXPORT(chunk_sum);

double sum_of_squares(std::span<const float> gradients, ThreadPool* pool) {
  std::vector<double> partial((gradients.size() + kChunk - 1) / kChunk);
  for_chunks(pool, static_cast<std::int64_t>(gradients.size()), kChunk,
             [&](std::int64_t begin, std::int64_t end) {
               const auto at = static_cast<std::size_t>(begin);
               const auto numel = static_cast<std::size_t>(end - begin);
               partial[at / kChunk] = HWY_DYNAMIC_DISPATCH(chunk_sum)(gradients.subspan(at, numel));
             });
  // The squares are too small to overflow fp64, and they cannot cancel.
  return std::accumulate(partial.begin(), partial.end(), 0.0);
}

double norm_of(double sum_of_squares, double loss_scale) {
  return std::sqrt(sum_of_squares) / loss_scale;
}

float scale_of(double norm, double loss_scale, double clipping) {
  double scale = 1.0 / loss_scale;
  if (clipping > 0.0) scale *= std::min(1.0, clipping / (norm + 1e-6));
  return static_cast<float>(scale);
}

GradientFactor gradient_factor(std::span<const double> sums, double loss_scale, double clipping) {
  GradientFactor result;
  for (const double sum : sums) result.sum_of_squares += sum;
  result.factor = std::isfinite(result.sum_of_squares)
                      ? scale_of(norm_of(result.sum_of_squares, loss_scale), loss_scale, clipping)
                      : std::numeric_limits<float>::quiet_NaN();
  return result;
}

}  // namespace strata::kernels
#endif  // HWY_ONCE
