#include "strata/engine/reduce/gradient_shards.h"

#include <algorithm>
#include <utility>

#include "strata/base/error.h"

namespace strata::engine {
namespace {

std::span<float> as_floats(device::Memory& memory, Numel numel) {
  return {reinterpret_cast<float*>(memory.bytes().data()), numel.size()};
}

}  // namespace

GradientShards::GradientShards(std::vector<Unit>& units, device::Device& device, DType dtype)
    : units_(units), device_(device), dtype_(dtype), shards_(units.size()) {}

std::span<float> GradientShards::scratch(std::unique_ptr<device::Memory>& memory, Numel numel) {
  const Bytes bytes = bytes_of(numel, DType::kFloat32);
  if (memory == nullptr || memory->bytes().size() < bytes.size()) {
    memory.reset();
    memory = device_.allocate(bytes, memory::Kind::kGradientShards);
  }
  return as_floats(*memory, numel);
}

GradientShards::Target GradientShards::begin(int unit) {
  Shard& shard = shards_[static_cast<std::size_t>(unit)];
  shard.measured = false;
  const Numel numel = units_[static_cast<std::size_t>(unit)].layout.shard();
  if (shard.memory == nullptr) {
    shard.memory = device_.allocate(bytes_of(numel, dtype_), memory::Kind::kGradientShards);
  }
  if (dtype_ != DType::kFloat32) return {scratch(shard.arriving, numel), false};
  return {as_floats(*shard.memory, numel), shard.filled};
}

void GradientShards::settle(int unit) {
  Shard& shard = shards_[static_cast<std::size_t>(unit)];
  if (dtype_ != DType::kFloat32) {
    const Numel numel = units_[static_cast<std::size_t>(unit)].layout.shard();
    std::byte* target = shard.memory->bytes().data();
    const std::byte* source = shard.arriving->bytes().data();
    device::Stream& stream = device_.compute_stream();
    if (shard.filled) {
      device_.accumulate(target, dtype_, source, DType::kFloat32, numel, stream);
    } else {
      device_.cast(target, dtype_, source, DType::kFloat32, numel, stream);
    }
    arrived_.push_back({std::move(shard.arriving), stream.record()});
    while (!arrived_.empty() &&
           (arrived_.size() > kArrived || arrived_.front().folded_in->done())) {
      arrived_.front().folded_in->wait();
      arrived_.pop_front();
    }
  }
  shard.filled = true;
}

std::span<float> GradientShards::values(int unit) {
  Shard& shard = shards_[static_cast<std::size_t>(unit)];
  STRATA_ASSERT(shard.filled);
  const Numel numel = units_[static_cast<std::size_t>(unit)].layout.shard();
  if (dtype_ == DType::kFloat32) return as_floats(*shard.memory, numel);
  const std::span<float> wide = scratch(widened_, numel);
  device_.cast(widened_->bytes().data(), DType::kFloat32, shard.memory->bytes().data(), dtype_,
               numel, device_.compute_stream());
  return wide;
}

std::vector<kernels::GradStats> GradientShards::statistics(std::span<const int> units) {
  device::Stream& stream = device_.compute_stream();
  std::vector<kernels::GradStats> result;
  if (dtype_ == DType::kFloat32) {
    std::vector<std::span<const float>> all;
    for (const int unit : units) all.push_back(values(unit));
    return device_.grad_stats(all, stream);
  }
  for (const int unit : units) {  // widened one by one
    const std::span<const float> wide[] = {values(unit)};
    result.push_back(device_.grad_stats(wide, stream).front());
  }
  return result;
}

std::span<double> GradientShards::squares_memory() {
  if (squares_ == nullptr) {
    const Bytes bytes = bytes_of(Numel(shards_.size()), DType::kFloat64);
    squares_ = device_.allocate(bytes, memory::Kind::kStaging);
    device_.fill_zero(squares_->bytes(), device_.compute_stream());
    device_.compute_stream().synchronize();  // once; measure() has a stream of its own
  }
  return {reinterpret_cast<double*>(squares_->bytes().data()), shards_.size()};
}

void GradientShards::measure(int unit, device::Stream& stream) {
  const auto first = static_cast<std::size_t>(unit);
  measure_run(first, first + 1, stream);
}

void GradientShards::measure_run(std::size_t first, std::size_t end, device::Stream& stream) {
  STRATA_ASSERT(dtype_ == DType::kFloat32);
  std::vector<std::span<const float>> all;
  for (std::size_t i = first; i < end; ++i) {
    all.push_back(as_floats(*shards_[i].memory, units_[i].layout.shard()));
    shards_[i].measured = true;
    shards_[i].stale = true;
  }
  device_.sums_of_squares(squares_memory().subspan(first, end - first), all, stream);
}

std::span<const double> GradientShards::squares() {
  const std::span<double> all = squares_memory();
  device::Stream& stream = device_.compute_stream();
  const auto wanting = [this](std::size_t i) {
    return i < shards_.size() && shards_[i].filled && !shards_[i].measured;
  };
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (!shards_[i].filled && std::exchange(shards_[i].stale, false))
      device_.fill_zero(std::as_writable_bytes(all.subspan(i, 1)), stream);
    std::size_t end = i;
    while (wanting(end)) ++end;
    if (end > i) measure_run(i, end, stream);
  }
  return all;
}

void GradientShards::clear() {
  for (Shard& shard : shards_) {
    shard.filled = false;
    shard.measured = false;
  }
  left_out_.clear();
}

}  // namespace strata::engine
