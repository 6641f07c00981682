#include "strata/device/cpu_device.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "strata/base/error.h"
#include "strata/device/cpu_shared_memory.h"
#include "strata/kernels/elementwise.h"
#include "strata/memory/host_buffer.h"
#include "strata/memory/system_memory.h"

namespace strata::device {
namespace {

// Copies and fills below this many bytes a thread are not worth handing over.
constexpr Bytes kCopyGrain = 1_MiB;

class CpuMemory final : public Memory {
 public:
  CpuMemory(memory::HostBuffer buffer, memory::ByteBudget::Hold hold)
      : buffer_(std::move(buffer)), hold_(std::move(hold)) {}
  std::span<std::byte> bytes() override { return buffer_.bytes(); }

 private:
  memory::HostBuffer buffer_;
  memory::ByteBudget::Hold hold_;
};

// Nothing can be moved faster within the host by pinning it.
class CpuHostMemory final : public HostMemory {
 public:
  explicit CpuHostMemory(memory::HostBuffer buffer) : buffer_(std::move(buffer)) {}
  std::span<std::byte> bytes() override { return buffer_.bytes(); }
  bool pinned() const override { return true; }

 private:
  memory::HostBuffer buffer_;
};

class CpuEvent final : public Event {
 public:
  bool done() override { return true; }
  void wait() override {}
};

class CpuTimedEvent final : public TimedEvent {
 public:
  bool done() override { return true; }
  void wait() override {}
  double seconds_since(TimedEvent& earlier) override {
    const auto* ours = dynamic_cast<const CpuTimedEvent*>(&earlier);
    STRATA_ASSERT(ours != nullptr);
    return std::chrono::duration<double>(time_ - ours->time_).count();
  }

 private:
  std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::now();
};

class CpuStream final : public Stream {
 public:
  std::unique_ptr<Event> record() override { return std::make_unique<CpuEvent>(); }
  std::unique_ptr<TimedEvent> record_timed() override { return std::make_unique<CpuTimedEvent>(); }
  void wait_for(Event& event) override { event.wait(); }
  void synchronize() override {}
};

}  // namespace

CpuDevice::CpuDevice(CpuDeviceOptions options)
    : ledger_(options.ledger ? std::move(options.ledger) : std::make_shared<memory::Ledger>()),
      waits_(options.waits ? std::move(options.waits) : std::make_shared<HostWaits>()),
      budget_(options.memory_limit ? memory::ByteBudget::create(*options.memory_limit) : nullptr),
      pool_(options.threads, std::move(options.cores)),
      compute_stream_(std::make_unique<CpuStream>()) {}

memory::ByteBudget::Hold CpuDevice::take_part(Bytes bytes, std::string_view what) {
  if (!budget_) return {};
  auto taken = budget_->take(bytes);
  if (!taken) {
    throw OutOfMemoryError(
        fmt::format("device cpu is out of memory ({}): {} wanted, {} left of its budget of {}; "
                    "shard over more ranks, "
                    "offload, or raise the budget; held: {}",
                    what, to_string(bytes), to_string(budget_->left()), to_string(budget_->limit()),
                    ledger_->report()));
  }
  return std::move(*taken);
}

std::unique_ptr<Memory> CpuDevice::allocate(Bytes bytes, memory::Kind kind) {
  memory::ByteBudget::Hold hold = take_part(bytes, memory::name_of(kind));
  memory::HostBuffer buffer(bytes,
                            {.ledger = ledger_, .tier = memory::Tier::kDevice, .kind = kind});
  return std::make_unique<CpuMemory>(std::move(buffer), std::move(hold));
}

std::unique_ptr<Memory> CpuDevice::allocate_uncharged(Bytes bytes) {
  memory::ByteBudget::Hold hold = take_part(bytes, "shared buffers");
  return std::make_unique<CpuMemory>(memory::HostBuffer(bytes), std::move(hold));
}

std::unique_ptr<HostMemory> CpuDevice::allocate_host(Bytes bytes, memory::Kind kind) {
  return std::make_unique<CpuHostMemory>(
      memory::HostBuffer(bytes, {.ledger = ledger_, .kind = kind}));
}

std::unique_ptr<GrowableMemory> CpuDevice::reserve(Bytes bytes, memory::Kind kind) {
  return std::make_unique<CpuGrowableMemory>(bytes, kind, ledger_, budget_);
}

std::unique_ptr<GrowableMemory> CpuDevice::reserve_shared(Bytes bytes, memory::Kind kind) {
  return std::make_unique<CpuGrowableMemory>(bytes, kind, ledger_, budget_,
                                             CpuGrowableMemory::Pages::kShared);
}

std::unique_ptr<PeerMapping> CpuDevice::reserve_mapping(Bytes bytes) {
  return std::make_unique<CpuPeerMapping>(bytes);
}

std::unique_ptr<HostRegistration> CpuDevice::pin(std::span<std::byte> /*host*/) {
  return std::make_unique<HostRegistration>();
}

Bytes CpuDevice::free_bytes() const {
  const Bytes system = memory::available_memory();
  return budget_ ? std::min(system, budget_->left()) : system;
}

bool CpuDevice::host_accessible(const std::byte* /*pointer*/) const {
  return true;
}

bool CpuDevice::device_accessible(const std::byte* /*pointer*/) const {
  return true;
}

Stream& CpuDevice::compute_stream() {
  return *compute_stream_;
}

std::unique_ptr<Stream> CpuDevice::create_stream() {
  return std::make_unique<CpuStream>();
}

void CpuDevice::copy(std::span<std::byte> target, std::span<const std::byte> source, Stream&) {
  STRATA_ASSERT(target.size() == source.size());
  if (target.empty()) return;
  const std::lock_guard lock(pool_mutex_);
  pool_.parallel_for(static_cast<std::int64_t>(target.size()), kCopyGrain.value,
                     [&](std::int64_t begin, std::int64_t end) {
                       std::memcpy(target.data() + begin, source.data() + begin,
                                   static_cast<std::size_t>(end - begin));
                     });
}

void CpuDevice::fill_zero(std::span<std::byte> target, Stream&) {
  if (target.empty()) return;
  const std::lock_guard lock(pool_mutex_);
  pool_.parallel_for(static_cast<std::int64_t>(target.size()), kCopyGrain.value,
                     [&](std::int64_t begin, std::int64_t end) {
                       std::memset(target.data() + begin, 0, static_cast<std::size_t>(end - begin));
                     });
}

void CpuDevice::cast(std::byte* target, DType target_dtype, const std::byte* source,
                     DType source_dtype, Numel numel, Stream&) {
  STRATA_ASSERT(is_floating(target_dtype) && is_floating(source_dtype) && numel.value >= 0);
  const std::lock_guard lock(pool_mutex_);
  kernels::cast(target, target_dtype, source, source_dtype, numel, &pool_);
}

void CpuDevice::accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                           DType source_dtype, Numel numel, Stream&) {
  STRATA_ASSERT(is_floating(target_dtype) && is_floating(source_dtype) && numel.value >= 0);
  const std::lock_guard lock(pool_mutex_);
  kernels::accumulate(target, target_dtype, source, source_dtype, numel, &pool_);
}

void CpuDevice::scale(std::span<float> target, std::span<const float> source, float factor,
                      Stream&) {
  STRATA_ASSERT(target.size() == source.size());
  const std::lock_guard lock(pool_mutex_);
  const std::byte* sources[] = {reinterpret_cast<const std::byte*>(source.data())};
  kernels::sum_in_order(target, sources, DType::kFloat32, factor, false, &pool_);
}

void CpuDevice::sum_in_order(std::span<float> target, std::span<const std::byte* const> sources,
                             DType dtype, float scale, bool accumulate, Stream&) {
  STRATA_ASSERT(sources.size() <= kSourcesMax);
  const std::lock_guard lock(pool_mutex_);
  kernels::sum_in_order(target, sources, dtype, scale, accumulate, &pool_);
}

void CpuDevice::store_remainder(const kernels::MasterRemainder& target, Numel first,
                                const std::byte* source, DType source_dtype, Numel numel, Stream&) {
  const std::lock_guard lock(pool_mutex_);
  kernels::store_remainder(target, first, source, source_dtype, numel, &pool_);
}

void CpuDevice::join_masters(std::span<float> masters, const std::byte* weights,
                             const kernels::MasterRemainder& remainder, Numel first, Stream&) {
  kernels::join_masters(masters, weights, remainder, first);
}

void CpuDevice::adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                              Stream&) {
  const std::lock_guard lock(pool_mutex_);
  kernels::adopt_written(masters, weights, dtype, &pool_);
}

void CpuDevice::adam_step(const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars,
                          Stream&) {
  const std::lock_guard lock(pool_mutex_);
  kernels::AdamScalars known = scalars;
  if (scalars.late_scale != nullptr) {
    if (std::isnan(*scalars.late_scale)) return;
    known.gradient_scale = *scalars.late_scale;
  }
  kernels::adam_step(spans, known, &pool_);
}

std::vector<kernels::Fingerprint> CpuDevice::fingerprints(
    std::span<const std::span<const std::byte>> runs, Bytes piece, Stream& /*stream*/) {
  const std::lock_guard lock(pool_mutex_);
  std::vector<kernels::Fingerprint> result;
  for (const std::span<const std::byte> run : runs) {
    for (std::size_t at = 0; at < run.size(); at += piece.size()) {
      result.push_back(
          kernels::fingerprint(run.subspan(at, std::min(piece.size(), run.size() - at)), &pool_));
    }
  }
  return result;
}

std::vector<kernels::GradStats> CpuDevice::grad_stats(
    std::span<const std::span<const float>> gradients, Stream&) {
  const std::lock_guard lock(pool_mutex_);
  std::vector<kernels::GradStats> result;
  for (const std::span<const float> values : gradients) {
    result.push_back(kernels::grad_stats(values, &pool_));
  }
  return result;
}

void CpuDevice::sums_of_squares(std::span<double> sums,
                                std::span<const std::span<const float>> gradients, Stream&) {
  STRATA_ASSERT(sums.size() == gradients.size());
  const std::lock_guard lock(pool_mutex_);
  for (std::size_t i = 0; i < sums.size(); ++i)
    sums[i] = kernels::grad_stats(gradients[i], &pool_).sum_of_squares;
}

void CpuDevice::gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                                double loss_scale, double clipping, Stream&) {
  result = kernels::gradient_factor(sums, loss_scale, clipping);
}

void CpuDevice::write_flag(Flag& flag, std::uint32_t value, Stream&) {
  flag.store(value, std::memory_order_release);
}

void CpuDevice::wait_flag(const Flag& flag, std::uint32_t value, Stream&) {
  while (!reached(flag.load(std::memory_order_acquire), value)) std::this_thread::yield();
}

}  // namespace strata::device
