#include "strata/engine/reduce/gradient_norm.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {

PackedCounts::PackedCounts(std::size_t counts, int most)
    : counts_(counts),
      bits_(static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(most)))),
      // A double holds whole numbers of up to this many bits exactly.
      per_double_(static_cast<std::size_t>(std::numeric_limits<double>::digits) / bits_) {
  STRATA_ASSERT(most >= 1);
}

std::vector<double> PackedCounts::ones_without(std::span<const int> absent) const {
  std::vector<bool> one(counts_, true);
  for (const int index : absent) nth(one, index) = false;
  std::vector<std::uint64_t> words((counts_ + per_double_ - 1) / per_double_);
  for (std::size_t i = 0; i < counts_; ++i) {
    if (one[i]) words[i / per_double_] |= std::uint64_t{1} << (i % per_double_ * bits_);
  }
  return {words.begin(), words.end()};
}

std::vector<int> PackedCounts::zeroes(std::span<const double> sum) const {
  const std::uint64_t mask = (std::uint64_t{1} << bits_) - 1;
  std::vector<int> result;
  for (std::size_t i = 0; i < counts_; ++i) {
    const auto word = static_cast<std::uint64_t>(sum[i / per_double_]);
    if ((word >> (i % per_double_ * bits_) & mask) == 0) result.push_back(static_cast<int>(i));
  }
  return result;
}

using kernels::GradientFactor;

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

void WholeGradients::gather(const Take& take) {
  reducer_.complete_groups();
  reducer_.reduce_late();
  GradientShards& shards = reducer_.shards();
  const auto wanted = [](const Unit& unit) { return unit.trainable() && !unit.spec.tile(); };
  Bytes largest;
  for (const Unit& unit : units_) {
    if (wanted(unit)) largest = std::max(largest, bytes_of(unit.layout.padded(), DType::kFloat32));
  }
  if (largest == Bytes()) return;
  const auto memory = device_.allocate(largest, memory::Kind::kStaging);
  device::Stream& stream = device_.compute_stream();
  const auto mine = static_cast<std::size_t>(collectives_.shard_position().index);
  for (const Unit& unit : units_) {
    if (!wanted(unit)) continue;
    const std::size_t bytes = bytes_of(unit.layout.shard(), DType::kFloat32).size();
    const auto slice = [&](std::size_t rank) {
      return memory->bytes().subspan(rank * bytes, bytes);
    };
    if (shards.filled(unit.id)) {
      device_.copy(slice(mine), std::as_bytes(shards.values(unit.id)), stream);
    } else {
      device_.fill_zero(slice(mine), stream);
    }
    stream.synchronize();
    // Where every shard group holds all of them, those of the first count.
    for (int rank = 0; rank < unit.layout.world_size(); ++rank)
      collectives_.broadcast(slice(static_cast<std::size_t>(rank)), rank);
    if (take) take(unit, reinterpret_cast<const float*>(memory->bytes().data()));
  }
  stream.synchronize();
}

}  // namespace strata::engine
