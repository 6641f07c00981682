#include "device/late_device.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "strata/base/error.h"

namespace strata::device {
namespace {

using Reach = LateMemoryMap::Reach;

Reach reach_of(const void* pointer) {
  return LateMemoryMap::of_process().reach_of(pointer);
}

// Memory that devices know of, for as long as this lives.
class Known {
 public:
  Known(std::span<const std::byte> memory, Reach reach) : memory_(memory) {
    LateMemoryMap::of_process().add(memory_, reach);
  }
  ~Known() { LateMemoryMap::of_process().forget(memory_); }
  Known(const Known&) = delete;
  Known& operator=(const Known&) = delete;

 private:
  std::span<const std::byte> memory_;
};

// From the heap, where sanitizers see a use after it was freed. `charge` counts its bytes: memory
// of the same size whose pages stay untouched.
class LateMemory final : public Memory {
 public:
  explicit LateMemory(std::unique_ptr<Memory> charge)
      : charge_(std::move(charge)),
        memory_(static_cast<std::byte*>(::operator new(charge_->bytes().size(), kAlignment))),
        known_(LateMemory::bytes(), Reach::kDevice) {
    // Not a number in any floating type.
    const std::span<std::byte> all = LateMemory::bytes();
    std::ranges::fill(all.first(std::min(all.size(), kFilled)), std::byte{0xFF});
  }
  std::span<std::byte> bytes() override { return {memory_.get(), charge_->bytes().size()}; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  static constexpr std::size_t kFilled = 1 << 20;
  struct Delete {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

  std::unique_ptr<Memory> charge_;
  std::unique_ptr<std::byte, Delete> memory_;
  Known known_;
};

class LateHostMemory final : public HostMemory {
 public:
  explicit LateHostMemory(std::unique_ptr<HostMemory> memory)
      : memory_(std::move(memory)), known_(memory_->bytes(), Reach::kPinned) {}
  std::span<std::byte> bytes() override { return memory_->bytes(); }
  bool pinned() const override { return true; }

 private:
  std::unique_ptr<HostMemory> memory_;
  Known known_;
};

class LateGrowableMemory final : public GrowableMemory {
 public:
  explicit LateGrowableMemory(std::unique_ptr<GrowableMemory> memory)
      : memory_(std::move(memory)),
        known_({memory_->base(), memory_->reserved().size()}, Reach::kDevice) {}
  std::byte* base() override { return memory_->base(); }
  Bytes reserved() const override { return memory_->reserved(); }
  Bytes backed() const override { return memory_->backed(); }
  void grow_to(Bytes bytes) override { memory_->grow_to(bytes); }
  void release() override { memory_->release(); }
  std::size_t pieces() const override { return memory_->pieces(); }
  SharedHandle piece(std::size_t index) const override { return memory_->piece(index); }

 private:
  std::unique_ptr<GrowableMemory> memory_;
  Known known_;
};

class LateMapping final : public PeerMapping {
 public:
  LateMapping(std::unique_ptr<PeerMapping> mapping, Bytes bytes)
      : mapping_(std::move(mapping)), known_({mapping_->base(), bytes.size()}, Reach::kDevice) {}
  const std::byte* base() const override { return mapping_->base(); }
  Bytes mapped() const override { return mapping_->mapped(); }
  std::size_t pieces() const override { return mapping_->pieces(); }
  void add(SharedHandle piece) override { mapping_->add(std::move(piece)); }

 private:
  std::unique_ptr<PeerMapping> mapping_;
  Known known_;
};

class LateRegistration final : public HostRegistration {
 public:
  explicit LateRegistration(std::span<std::byte> host) : known_(host, Reach::kPinned) {}

 private:
  Known known_;
};

// Throws if no kernel reaches the memory; null is no memory.
void require_reachable(const void* pointer) {
  if (pointer != nullptr && reach_of(pointer) == Reach::kOrdinary)
    throw DeviceError("a kernel was given ordinary host memory, which no kernel of a GPU reaches");
}

LateStream& late(Stream& stream) {
  auto* const ours = dynamic_cast<LateStream*>(&stream);
  STRATA_ASSERT(ours != nullptr);
  return *ours;
}

Stream& stream_of(CpuDevice& hands) {
  return hands.compute_stream();
}

}  // namespace

LateDevice::LateDevice(CpuDeviceOptions options, std::uint64_t seed)
    : CpuDevice(std::move(options)),
      chip_(std::make_shared<LateChip>(seed, host_waits())),
      compute_stream_(std::make_unique<LateStream>(chip_)) {}

void LateDevice::enqueue(Stream& stream, std::function<void()> work) {
  late(stream).push([work = std::move(work)](CpuDevice&) { work(); });
}

std::unique_ptr<Memory> LateDevice::allocate(Bytes bytes, memory::Kind kind) {
  return std::make_unique<LateMemory>(CpuDevice::allocate(bytes, kind));
}

std::unique_ptr<Memory> LateDevice::allocate_uncharged(Bytes bytes) {
  return std::make_unique<LateMemory>(CpuDevice::allocate_uncharged(bytes));
}

std::unique_ptr<HostMemory> LateDevice::allocate_host(Bytes bytes, memory::Kind kind) {
  return std::make_unique<LateHostMemory>(CpuDevice::allocate_host(bytes, kind));
}

std::unique_ptr<GrowableMemory> LateDevice::reserve(Bytes bytes, memory::Kind kind) {
  return std::make_unique<LateGrowableMemory>(CpuDevice::reserve(bytes, kind));
}

std::unique_ptr<GrowableMemory> LateDevice::reserve_shared(Bytes bytes, memory::Kind kind) {
  return std::make_unique<LateGrowableMemory>(CpuDevice::reserve_shared(bytes, kind));
}

std::unique_ptr<PeerMapping> LateDevice::reserve_mapping(Bytes bytes) {
  return std::make_unique<LateMapping>(CpuDevice::reserve_mapping(bytes), bytes);
}

std::unique_ptr<HostRegistration> LateDevice::pin(std::span<std::byte> host) {
  return std::make_unique<LateRegistration>(host);
}

bool LateDevice::host_accessible(const std::byte* pointer) const {
  return reach_of(pointer) != Reach::kDevice;
}

bool LateDevice::device_accessible(const std::byte* pointer) const {
  return reach_of(pointer) != Reach::kOrdinary;
}

std::unique_ptr<Stream> LateDevice::create_stream() {
  return std::make_unique<LateStream>(chip_);
}

void LateDevice::copy(std::span<std::byte> target, std::span<const std::byte> source,
                      Stream& stream) {
  STRATA_ASSERT(target.size() == source.size());
  if (target.empty()) return;
  if (device_accessible(source.data())) {
    late(stream).push([=](CpuDevice& hands) { hands.copy(target, source, stream_of(hands)); });
  } else {
    late(stream).push([target, staged = std::vector(source.begin(), source.end())](
                          CpuDevice& hands) { hands.copy(target, staged, stream_of(hands)); });
  }
  if (!device_accessible(target.data())) late(stream).finish();
}

void LateDevice::fill_zero(std::span<std::byte> target, Stream& stream) {
  if (target.empty()) return;
  require_reachable(target.data());
  late(stream).push([=](CpuDevice& hands) { hands.fill_zero(target, stream_of(hands)); });
}

void LateDevice::cast(std::byte* target, DType target_dtype, const std::byte* source,
                      DType source_dtype, Numel numel, Stream& stream) {
  if (numel.value == 0) return;
  // A cast to the same dtype is a copy, as on CUDA.
  if (target_dtype == source_dtype) {
    const std::size_t bytes = bytes_of(numel, target_dtype).size();
    return copy({target, bytes}, {source, bytes}, stream);
  }
  require_reachable(target);
  require_reachable(source);
  late(stream).push([=](CpuDevice& hands) {
    hands.cast(target, target_dtype, source, source_dtype, numel, stream_of(hands));
  });
}

void LateDevice::accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                            DType source_dtype, Numel numel, Stream& stream) {
  if (numel.value == 0) return;
  require_reachable(target);
  require_reachable(source);
  late(stream).push([=](CpuDevice& hands) {
    hands.accumulate(target, target_dtype, source, source_dtype, numel, stream_of(hands));
  });
}

void LateDevice::sum_in_order(std::span<float> target, std::span<const std::byte* const> sources,
                              DType dtype, float scale, bool accumulate, Stream& stream) {
  STRATA_ASSERT(sources.size() <= kSourcesMax);
  if (target.empty()) return;
  require_reachable(target.data());
  for (const std::byte* source : sources) require_reachable(source);
  late(stream).push([=, all = std::vector(sources.begin(), sources.end())](CpuDevice& hands) {
    hands.sum_in_order(target, all, dtype, scale, accumulate, stream_of(hands));
  });
}

void LateDevice::store_remainder(const kernels::MasterRemainder& target, Numel first,
                                 const std::byte* source, DType source_dtype, Numel numel,
                                 Stream& stream) {
  if (numel.value == 0) return;
  require_reachable(target.low);
  require_reachable(source);
  late(stream).push([=](CpuDevice& hands) {
    hands.store_remainder(target, first, source, source_dtype, numel, stream_of(hands));
  });
}

void LateDevice::join_masters(std::span<float> masters, const std::byte* weights,
                              const kernels::MasterRemainder& remainder, Numel first,
                              Stream& stream) {
  if (masters.empty()) return;
  require_reachable(masters.data());
  require_reachable(weights);
  late(stream).push([=](CpuDevice& hands) {
    hands.join_masters(masters, weights, remainder, first, stream_of(hands));
  });
}

void LateDevice::adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                               Stream& stream) {
  if (masters.empty()) return;
  require_reachable(masters.data());
  require_reachable(weights);
  late(stream).push(
      [=](CpuDevice& hands) { hands.adopt_written(masters, weights, dtype, stream_of(hands)); });
}

void LateDevice::update_step(const kernels::UpdateSpans& spans,
                             const kernels::UpdateScalars& scalars, Stream& stream) {
  if (spans.numel() == 0) return;
  require_reachable(spans.weight.data());
  require_reachable(spans.weight16);
  require_reachable(spans.remainder.low);
  require_reachable(spans.exp_avg.data());
  require_reachable(spans.exp_avg_sq.data());
  require_reachable(spans.moments16.exp_avg);
  require_reachable(spans.moments16.exp_avg_sq);
  require_reachable(spans.gradient.data());
  require_reachable(spans.gradient16.values);
  require_reachable(scalars.late_scale);
  late(stream).push([=](CpuDevice& hands) { hands.update_step(spans, scalars, stream_of(hands)); });
}

std::vector<kernels::Fingerprint> LateDevice::fingerprints(
    std::span<const std::span<const std::byte>> runs, Bytes piece, Stream& stream) {
  std::vector<kernels::Fingerprint> result;
  late(stream).push(
      [&](CpuDevice& hands) { result = hands.fingerprints(runs, piece, stream_of(hands)); });
  stream.synchronize();
  return result;
}

void LateDevice::sums_of_squares(std::span<double> sums,
                                 std::span<const std::span<const float>> gradients,
                                 Stream& stream) {
  STRATA_ASSERT(sums.size() == gradients.size());
  if (sums.empty()) return;
  require_reachable(sums.data());
  for (const auto& gradient : gradients)
    if (!gradient.empty()) require_reachable(gradient.data());
  late(stream).push([=, all = std::vector(gradients.begin(), gradients.end())](CpuDevice& hands) {
    hands.sums_of_squares(sums, all, stream_of(hands));
  });
}

void LateDevice::gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                                 double loss_scale, double clipping, Stream& stream) {
  require_reachable(&result);
  require_reachable(sums.data());
  late(stream).push([=, &result](CpuDevice& hands) {
    hands.gradient_factor(result, sums, loss_scale, clipping, stream_of(hands));
  });
}

void LateDevice::write_flag(Flag& flag, std::uint32_t value, Stream& stream) {
  require_reachable(&flag);
  late(stream).push([&flag, value](CpuDevice&) { raise_flag(flag, value); });
}

void LateDevice::wait_flag(const Flag& flag, std::uint32_t value, Stream& stream) {
  require_reachable(&flag);
  late(stream).push([&flag, value](CpuDevice&) { await_flag(flag, value); });
}

}  // namespace strata::device
