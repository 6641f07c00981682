// The CPU as a device: memory is host memory charged to the device tier, kernels run in the
// caller's thread and in the device's own threads, and every call is complete when it returns.
// Threads: internally synchronised; kernels of several callers take turns at the threads. Results
// do not depend on the number of threads. Ownership: memory and streams may outlive the device.
// Errors: OutOfMemoryError from allocate, reserve and grow_to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "strata/base/error.h"
#include "strata/base/thread_pool.h"
#include "strata/device/device.h"
#include "strata/kernels/elementwise.h"
#include "strata/memory/ledger.h"

namespace strata::device {

struct CpuDeviceOptions {
  std::shared_ptr<memory::Ledger> ledger = nullptr;  // null: the device makes its own
  int threads = 1;                             // that share a kernel, the caller's included; >= 1
  std::vector<int> cores = {};                 // that its own threads are bound to; empty: to none
  std::shared_ptr<HostWaits> waits = nullptr;  // null: the device makes its own
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(CpuDeviceOptions options = {});

  std::string_view name() const override { return "cpu"; }
  const std::shared_ptr<memory::Ledger>& ledger() const override { return ledger_; }
  bool runs_ahead() const override { return false; }
  const std::shared_ptr<HostWaits>& host_waits() const override { return waits_; }

  std::unique_ptr<Memory> allocate(Bytes bytes, memory::Kind kind) override;
  std::unique_ptr<GrowableMemory> reserve(Bytes bytes, memory::Kind kind) override;
  std::unique_ptr<GrowableMemory> reserve_shared(Bytes bytes, memory::Kind kind) override;
  std::unique_ptr<PeerMapping> reserve_mapping(Bytes bytes) override;
  std::unique_ptr<HostRegistration> pin(std::span<std::byte>) override {
    return std::make_unique<HostRegistration>();
  }
  std::unique_ptr<Memory> allocate_uncharged(Bytes bytes) override;
  std::unique_ptr<HostMemory> allocate_host(Bytes bytes, memory::Kind kind) override;
  void expect_host(Bytes, memory::Kind) override {}  // pins nothing
  Bytes free_bytes() const override;
  bool host_accessible(const std::byte*) const override { return true; }
  bool device_accessible(const std::byte*) const override { return true; }
  std::unique_ptr<Stream> create_stream() override;
  Stream& compute_stream() override { return *compute_stream_; }

  void copy(std::span<std::byte> target, std::span<const std::byte> source, Stream&) override {
    STRATA_ASSERT(target.size() == source.size());
    for_bytes(target, [&](std::span<std::byte> part, std::size_t at) {
      std::memcpy(part.data(), source.data() + at, part.size());
    });
  }
  void fill_zero(std::span<std::byte> target, Stream&) override {
    for_bytes(target, [](std::span<std::byte> part, std::size_t) {
      std::memset(part.data(), 0, part.size());
    });
  }
  void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
            Numel numel, Stream&) override {
    STRATA_ASSERT(is_floating(target_dtype) && is_floating(source_dtype) && numel.value >= 0);
    const std::lock_guard lock(pool_mutex_);
    kernels::cast(target, target_dtype, source, source_dtype, numel, &pool_);
  }
  void accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                  DType source_dtype, Numel numel, Stream&) override {
    STRATA_ASSERT(is_floating(target_dtype) && is_floating(source_dtype) && numel.value >= 0);
    const std::lock_guard lock(pool_mutex_);
    kernels::accumulate(target, target_dtype, source, source_dtype, numel, &pool_);
  }
  void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                    float scale, bool accumulate, Stream&) override {
    STRATA_ASSERT(sources.size() <= kSourcesMax);
    const std::lock_guard lock(pool_mutex_);
    kernels::sum_in_order(target, sources, dtype, scale, accumulate, &pool_);
  }
  void store_remainder(const kernels::MasterRemainder& target, Numel first, const std::byte* source,
                       DType source_dtype, Numel numel, Stream&) override {
    const std::lock_guard lock(pool_mutex_);
    kernels::store_remainder(target, first, source, source_dtype, numel, &pool_);
  }
  void join_masters(std::span<float> masters, const std::byte* weights,
                    const kernels::MasterRemainder& remainder, Numel first, Stream&) override {
    kernels::join_masters(masters, weights, remainder, first);
  }
  void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                     Stream&) override {
    const std::lock_guard lock(pool_mutex_);
    kernels::adopt_written(masters, weights, dtype, &pool_);
  }
  void update_step(const kernels::UpdateSpans& spans, const kernels::UpdateScalars& scalars,
                   Stream&) override {
    const std::lock_guard lock(pool_mutex_);
    kernels::UpdateScalars known = scalars;
    if (scalars.late_scale != nullptr) {
      if (std::isnan(*scalars.late_scale)) return;
      known.gradient_scale = *scalars.late_scale;
    }
    kernels::update_step(spans, known, &pool_);
  }
  std::vector<kernels::Fingerprint> fingerprints(std::span<const std::span<const std::byte>> runs,
                                                 Bytes piece, Stream& /*stream*/) override {
    const std::lock_guard lock(pool_mutex_);
    std::vector<kernels::Fingerprint> result;
    for (const std::span<const std::byte> run : runs) {
      for (std::size_t at = 0; at < run.size(); at += piece.size())
        result.push_back(
            kernels::fingerprint(run.subspan(at, std::min(piece.size(), run.size() - at)), &pool_));
    }
    return result;
  }
  void sums_of_squares(std::span<double> sums, std::span<const std::span<const float>> gradients,
                       Stream&) override {
    STRATA_ASSERT(sums.size() == gradients.size());
    const std::lock_guard lock(pool_mutex_);
    for (std::size_t i = 0; i < sums.size(); ++i)
      sums[i] = kernels::sum_of_squares(gradients[i], &pool_);
  }
  void gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                       double loss_scale, double clipping, Stream&) override {
    result = kernels::gradient_factor(sums, loss_scale, clipping);
  }
  void vocabulary_losses(const kernels::VocabularyRows& rows, Stream&) override {
    const std::lock_guard lock(pool_mutex_);
    kernels::vocabulary_losses(rows, &pool_);
  }
  void write_flag(Flag& flag, std::uint32_t value, Stream&) override {
    flag.store(value, std::memory_order_release);
  }
  void wait_flag(const Flag& flag, std::uint32_t value, Stream&) override {
    while (!reached(flag.load(std::memory_order_acquire), value)) std::this_thread::yield();
  }

 private:
  // Calls work(part, offset) for parts of `bytes`: less in a thread is not worth handing over.
  template <typename Work>
  void for_bytes(std::span<std::byte> bytes, const Work& work) {
    if (bytes.empty()) return;
    const std::lock_guard lock(pool_mutex_);
    pool_.parallel_for(std::ssize(bytes), (1_MiB).value, [&](std::int64_t begin, std::int64_t end) {
      const auto at = static_cast<std::size_t>(begin);
      work(bytes.subspan(at, static_cast<std::size_t>(end - begin)), at);
    });
  }

  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<HostWaits> waits_;
  std::mutex pool_mutex_;  // one loop at a time
  ThreadPool pool_;        // guarded by pool_mutex_
  const std::unique_ptr<Stream> compute_stream_;
};

}  // namespace strata::device
