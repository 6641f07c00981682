#include "strata/engine/reduce/gradient_shards.h"

namespace strata::engine {
namespace {

std::span<float> as_floats(device::Memory& memory, Numel numel) {
  return {reinterpret_cast<float*>(memory.bytes().data()), numel.size()};
}

}  // namespace

GradientShards::GradientShards(std::vector<Unit>& units, device::Device& device, DType dtype,
                               memory::Tier tier, bool in_16, offload::LinkWatch& watch)
    : units_(units),
      device_(device),
      dtype_(dtype),
      tier_(tier),
      watch_(watch),
      in_16_(in_16 && dtype == DType::kFloat32 && device.runs_ahead()),
      memory_(
          units, device, memory::Kind::kGradientShards, dtype,
          [this](const Unit& unit) { return is_far(unit); },
          [this](const Unit& unit) { return !rests_in_16(unit); }),
      memory_16_(
          units, device, memory::Kind::kGradientShards, DType::kBFloat16,
          [](const Unit&) { return true; }, [this](const Unit& unit) { return rests_in_16(unit); }),
      shards_(units.size()) {
  STRATA_ASSERT(tier == memory::Tier::kDevice || tier == memory::Tier::kHost);
}

GradientShards::Target GradientShards::begin(int unit, bool is_16) {
  Shard& shard = nth(shards_, unit);
  if (rests_in_16(nth(units_, unit)) && (shard.filled || !is_16)) keep_in_32();
  shard.measured = false;
  const Numel numel = nth(units_, unit).layout.shard();
  const std::span<std::byte> memory = kept(unit);
  if (!through_scratch(unit))
    return {{reinterpret_cast<float*>(memory.data()), numel.size()}, shard.filled};
  if (shard.arriving == nullptr) shard.arriving = scratch_.take(bytes_of(numel, DType::kFloat32));
  return {as_floats(*shard.arriving, numel), false};
}

void GradientShards::finish(int unit) {
  Shard& shard = nth(shards_, unit);
  if (through_scratch(unit)) {
    device::Stream& compute = device_.compute_stream();
    const bool leaves = moves(unit);
    if (leaves && leaving_ == nullptr) leaving_ = device_.create_stream();
    if (leaves) leaving_->wait_for(*compute.record());  // which the reduction ended in
    device::Stream& stream = leaves ? *leaving_ : compute;
    const auto first = static_cast<std::size_t>(unit);
    if (on_host(unit) && shard.filled && dtype_ == DType::kFloat32)
      host_sums_.add_to(as_floats(*shard.arriving, nth(units_, unit).layout.shard()), kept(unit),
                        shard.left.get(), stream);
    if (dtype_ == DType::kFloat32) measure_run(first, first + 1, stream);
    fold_in(unit, stream);
    if (leaves) shard.left = stream.record();
    scratch_.give_back(std::move(shard.arriving), stream.record());
  }
  shard.filled = true;
}

void GradientShards::fold_in(int unit, device::Stream& stream) {
  const Shard& shard = nth(shards_, unit);
  const Unit& of = nth(units_, unit);
  const Numel numel = of.layout.shard();
  const std::byte* source = shard.arriving->bytes().data();
  const std::span<std::byte> target = kept(unit);
  const Bytes bytes(target.size());
  const auto fold = [&] {
    if (rests_in_16(of))
      device_.copy(target,
                   narrowing_.narrow(shard.arriving->bytes(), of.layout.dtype(), numel, stream),
                   stream);
    else if (shard.filled && dtype_ != DType::kFloat32)
      device_.accumulate(target.data(), dtype_, source, DType::kFloat32, numel, stream);
    else if (dtype_ == DType::kFloat32)
      device_.copy(target, {source, target.size()}, stream);
    else
      device_.cast(target.data(), dtype_, source, DType::kFloat32, numel, stream);
  };
  if (!on_host(unit)) return fold();
  watch_.copy(offload::Link::kDown, bytes, stream, [&] {
    if (!shard.filled || dtype_ == DType::kFloat32) return fold();
    watch_.copy(offload::Link::kUp, bytes, stream, fold);
  });
}

// Once something is added to a shard all of them rest in 32 bits, for good: so it goes on.
void GradientShards::keep_in_32() {
  wait_for_arrived();
  std::vector<const Unit*> narrow;
  for (const Unit& unit : units_) {
    unit.await_update(device_.compute_stream());
    if (unit.trainable() && rests_in_16(unit) && filled(unit.id)) narrow.push_back(&unit);
  }
  in_16_ = false;
  for (const Unit* const unit : narrow)
    device_.cast(memory_.of(*unit).data(), DType::kFloat32, memory_16_.of(*unit).data(),
                 unit->layout.dtype(), unit->layout.shard(), device_.compute_stream());
  if (leaving_ != nullptr) leaving_->synchronize();
  device_.compute_stream().synchronize();
  memory_16_.free();
}

void GradientShards::read_values(std::size_t first, std::size_t end, device::Stream& stream,
                                 const offload::LinkWatch::Call& read) {
  Bytes bytes;
  for (std::size_t i = first; i < end; ++i) {
    if (on_host(static_cast<int>(i)) && shards_[i].arriving == nullptr)
      bytes += bytes_of(units_[i].layout.shard(), kept_dtype(units_[i]));
  }
  if (bytes > Bytes()) return watch_.copy(offload::Link::kUp, bytes, stream, read);
  read();
}

void GradientShards::wait_for_arrived() {
  if (leaving_ != nullptr && scratch_.in_use())
    watch_.await_copies([&] { device_.compute_stream().wait_for(*leaving_->record()); });
  if (device::Stream* const stream = std::exchange(measuring_, nullptr))
    device_.compute_stream().wait_for(*stream->record());
}

GradientShards::Resting GradientShards::resting(int unit) {
  STRATA_ASSERT(filled(unit));
  return {kept(unit), kept_dtype(nth(units_, unit))};
}

std::span<float> GradientShards::values(int unit) {
  STRATA_ASSERT(filled(unit));
  wait_for_arrived();
  const Unit& of = nth(units_, unit);
  const Numel numel = of.layout.shard();
  const DType dtype = kept_dtype(of);
  if (dtype == DType::kFloat32) return memory_.floats_of(of);
  const Bytes bytes = bytes_of(numel, DType::kFloat32);
  if (widened_ == nullptr || Bytes(widened_->bytes().size()) < bytes) {
    if (widened_ != nullptr) device_.compute_stream().synchronize();  // what was queued uses it
    widened_.reset();
    widened_ = device_.allocate(bytes, memory::Kind::kGradientShards);
  }
  device::Stream& stream = device_.compute_stream();
  const auto first = static_cast<std::size_t>(unit);
  read_values(first, first + 1, stream, [&] {
    device_.cast(widened_->bytes().data(), DType::kFloat32, kept(unit).data(), dtype, numel,
                 stream);
  });
  return as_floats(*widened_, numel);
}

std::span<std::byte> GradientShards::change(int unit) {
  Shard& shard = nth(shards_, unit);
  nth(units_, unit).require_not_early();
  if (rests_in_16(nth(units_, unit))) keep_in_32();
  const std::span<std::byte> values = kept(unit);
  wait_for_arrived();
  nth(units_, unit).await_update(device_.compute_stream());
  shard.measured = false;
  if (!std::exchange(shard.filled, true)) device_.fill_zero(values, device_.compute_stream());
  return values;
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
  // Tiles follow each other at once: the next one would wait on the stream. Others leave, measured.
  if (through_scratch(unit) || units_[first].spec.tile()) return;
  measure_run(first, first + 1, stream);
  measuring_ = &stream;
}

void GradientShards::measure_run(std::size_t first, std::size_t end, device::Stream& stream) {
  std::vector<std::span<const float>> all;
  for (std::size_t i = first; i < end; ++i) {
    all.push_back(shards_[i].arriving != nullptr
                      ? as_floats(*shards_[i].arriving, units_[i].layout.shard())
                  : dtype_ == DType::kFloat32 ? memory_.floats_of(units_[i])
                                              : values(static_cast<int>(i)));
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
    // Narrow ones are widened one by one.
    while (wanting(end) && (end == i || dtype_ == DType::kFloat32)) ++end;
    if (end > i) measure_run(i, end, stream);
  }
  return all;
}

std::vector<double> GradientShards::sums_of_squares() {
  std::vector<double> result(shards_.size());
  device::Stream& stream = device_.compute_stream();
  device_.copy(std::as_writable_bytes(std::span(result)), std::as_bytes(squares()), stream);
  stream.synchronize();
  return result;
}

void GradientShards::clear() {
  for (Shard& shard : shards_) {
    shard.filled = false;
    shard.measured = false;
    shard.offloaded.reset();
    if (shard.arriving != nullptr) scratch_.give_back(std::move(shard.arriving));  // abandoned
  }
  memory_.change_places();
  memory_16_.change_places();
  left_out_.clear();
}

void GradientShards::offload_states(bool pinned) {
  wait_for_arrived();
  for (ShardMemory* const memory : {&memory_, &memory_16_})
    memory->bring_back([this](const Unit& unit) { return filled(unit.id); });
  std::vector<offload::OffloadedMemory> memory;
  for (const Unit& unit : units_) {
    Shard& shard = nth(shards_, unit.id);
    const std::span<std::byte> values = memory_.on_device(unit);
    if (!values.empty() && shard.filled) memory.push_back({values, &shard.offloaded});
  }
  offload::offload_all(device_, memory, memory::Kind::kGradientShards, pinned);
  memory_.free_on_device();
  scratch_.free();
  host_sums_.free();
  widened_.reset();
}

void GradientShards::reload_states() {
  for (const Unit& unit : units_) {
    auto& offloaded = nth(shards_, unit.id).offloaded;
    if (offloaded != nullptr) offload::reload(device_, offloaded, memory_.of(unit));
  }
}

}  // namespace strata::engine
