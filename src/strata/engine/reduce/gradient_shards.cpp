#include "strata/engine/reduce/gradient_shards.h"

namespace strata::engine {
namespace {

std::span<float> as_floats(device::Memory& memory, Numel numel) {
  return {reinterpret_cast<float*>(memory.bytes().data()), numel.size()};
}

}  // namespace

GradientShards::GradientShards(std::vector<Unit>& units, device::Device& device, DType dtype,
                               memory::Tier tier, offload::LinkWatch& watch)
    : units_(units),
      device_(device),
      dtype_(dtype),
      tier_(tier),
      watch_(watch),
      memory_(units, device, memory::Kind::kGradientShards, dtype,
              [this](const Unit& unit) { return on_host(unit.id); }),
      shards_(units.size()) {
  STRATA_ASSERT(tier == memory::Tier::kDevice || tier == memory::Tier::kHost);
}

// One that is large enough and not twice as large; units repeat.
std::unique_ptr<device::Memory> GradientShards::take_scratch(Bytes bytes) {
  for (auto& each : spare_) {
    const Bytes has(each->bytes().size());
    if (has < bytes || has > bytes * 2) continue;
    std::swap(each, spare_.back());
    auto found = std::move(spare_.back());
    spare_.pop_back();
    return found;
  }
  if (spare_.size() > kArrived) spare_.erase(spare_.begin());
  return device_.allocate(bytes, memory::Kind::kGradientShards);
}

GradientShards::Target GradientShards::begin(int unit) {
  Shard& shard = nth(shards_, unit);
  shard.measured = false;
  const Numel numel = nth(units_, unit).layout.shard();
  const std::span<std::byte> memory = kept(unit);
  if (!through_scratch(unit))
    return {{reinterpret_cast<float*>(memory.data()), numel.size()}, shard.filled};
  if (shard.arriving == nullptr) shard.arriving = take_scratch(bytes_of(numel, DType::kFloat32));
  return {as_floats(*shard.arriving, numel), false};
}

void GradientShards::finish(int unit) {
  Shard& shard = nth(shards_, unit);
  if (through_scratch(unit)) {
    device::Stream& compute = device_.compute_stream();
    const bool leaves = on_host(unit);
    if (leaves && leaving_ == nullptr) leaving_ = device_.create_stream();
    if (leaves) leaving_->wait_for(*compute.record());  // which the reduction ended in
    device::Stream& stream = leaves ? *leaving_ : compute;
    fold_in(unit, stream);
    arrived_.push_back({std::move(shard.arriving), stream.record()});
    // By number alone: the memory that is held must not depend on the speed of the stream.
    while (arrived_.size() > kArrived) {
      arrived_.front().folded_in->wait();
      spare_.push_back(std::move(arrived_.front().memory));
      arrived_.pop_front();
    }
  }
  shard.filled = true;
}

void GradientShards::fold_in(int unit, device::Stream& stream) {
  const Shard& shard = nth(shards_, unit);
  const Numel numel = nth(units_, unit).layout.shard();
  const std::byte* source = shard.arriving->bytes().data();
  const std::span<std::byte> target = kept(unit);
  const Bytes bytes(target.size());
  const auto fold = [&] {
    if (shard.filled)
      device_.accumulate(target.data(), dtype_, source, DType::kFloat32, numel, stream);
    else if (dtype_ == DType::kFloat32)
      device_.copy(target, {source, target.size()}, stream);
    else
      device_.cast(target.data(), dtype_, source, DType::kFloat32, numel, stream);
  };
  if (!on_host(unit)) return fold();
  watch_.copy(offload::Link::kDown, bytes, stream, [&] {
    if (!shard.filled) return fold();
    watch_.copy(offload::Link::kUp, bytes, stream, fold);
  });
}

void GradientShards::read_values(std::size_t first, std::size_t end, device::Stream& stream,
                                 const offload::LinkWatch::Call& read) {
  Bytes bytes;
  for (std::size_t i = first; i < end; ++i) {
    if (on_host(static_cast<int>(i)) && shards_[i].arriving == nullptr)
      bytes += bytes_of(units_[i].layout.shard(), dtype_);
  }
  if (bytes > Bytes()) return watch_.copy(offload::Link::kUp, bytes, stream, read);
  read();
}

// Work that the compute stream gets from here on finds all finished values.
void GradientShards::wait_for_arrived() {
  if (leaving_ != nullptr && !arrived_.empty())
    watch_.await_copies([&] { device_.compute_stream().wait_for(*leaving_->record()); });
  if (device::Stream* const stream = std::exchange(measuring_, nullptr))
    device_.compute_stream().wait_for(*stream->record());
}

std::span<float> GradientShards::values(int unit) {
  STRATA_ASSERT(filled(unit));
  wait_for_arrived();
  const Numel numel = nth(units_, unit).layout.shard();
  if (dtype_ == DType::kFloat32) return memory_.floats_of(nth(units_, unit));
  const Bytes bytes = bytes_of(numel, DType::kFloat32);
  if (widened_ == nullptr || Bytes(widened_->bytes().size()) < bytes) {
    widened_.reset();
    widened_ = device_.allocate(bytes, memory::Kind::kGradientShards);
  }
  device::Stream& stream = device_.compute_stream();
  const auto first = static_cast<std::size_t>(unit);
  read_values(first, first + 1, stream, [&] {
    device_.cast(widened_->bytes().data(), DType::kFloat32, kept(unit).data(), dtype_, numel,
                 stream);
  });
  return as_floats(*widened_, numel);
}

std::span<std::byte> GradientShards::change(int unit) {
  Shard& shard = nth(shards_, unit);
  const std::span<std::byte> values = kept(unit);
  wait_for_arrived();
  shard.measured = false;
  if (!std::exchange(shard.filled, true)) device_.fill_zero(values, device_.compute_stream());
  return values;
}

std::vector<kernels::GradStats> GradientShards::statistics(std::span<const int> units) {
  device::Stream& stream = device_.compute_stream();
  std::vector<kernels::GradStats> result;
  if (dtype_ == DType::kFloat32) {
    std::vector<std::span<const float>> all;
    Bytes far;
    for (const int unit : units) {
      all.push_back(values(unit));
      if (on_host(unit)) far += Bytes(all.back().size_bytes());
    }
    watch_.copy(offload::Link::kUp, far, stream, [&] { result = device_.grad_stats(all, stream); });
    return result;
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
  if (through_scratch(unit) && shards_[first].filled) return;  // what has arrived is a part
  // Tiles follow each other at once: the next one would wait on the stream.
  if (!through_scratch(unit) && units_[first].spec.tile()) return;
  measure_run(first, first + 1, stream);
  measuring_ = &stream;
}

void GradientShards::measure_run(std::size_t first, std::size_t end, device::Stream& stream) {
  STRATA_ASSERT(dtype_ == DType::kFloat32);
  std::vector<std::span<const float>> all;
  for (std::size_t i = first; i < end; ++i) {
    all.push_back(shards_[i].arriving != nullptr
                      ? as_floats(*shards_[i].arriving, units_[i].layout.shard())
                      : memory_.floats_of(units_[i]));
    shards_[i].measured = true;
    shards_[i].stale = true;
  }
  const std::span<double> sums = squares_memory().subspan(first, end - first);
  read_values(first, end, stream, [&] { device_.sums_of_squares(sums, all, stream); });
}

std::span<const double> GradientShards::squares() {
  wait_for_arrived();
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
    shard.offloaded.reset();
    if (shard.arriving != nullptr) spare_.push_back(std::move(shard.arriving));  // abandoned
  }
  left_out_.clear();
}

void GradientShards::offload_states(bool pinned) {
  std::vector<offload::OffloadedMemory> memory;
  for (const Unit& unit : units_) {
    Shard& shard = nth(shards_, unit.id);
    const std::span<std::byte> values = memory_.on_device(unit);
    if (!values.empty() && shard.filled) memory.push_back({values, &shard.offloaded});
  }
  wait_for_arrived();
  offload::offload_all(device_, memory, memory::Kind::kGradientShards, pinned);
  memory_.free_on_device();
  arrived_.clear();
  spare_.clear();
  widened_.reset();
}

void GradientShards::reload_states() {
  for (const Unit& unit : units_) {
    auto& offloaded = nth(shards_, unit.id).offloaded;
    if (offloaded != nullptr) offload::reload(device_, offloaded, memory_.of(unit));
  }
}

}  // namespace strata::engine
