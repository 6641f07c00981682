// The CPU as a device: memory is host memory charged to the device tier, kernels run in the
// caller's thread and in the device's own threads, and every call is complete when it returns.
// Threads: internally synchronised; kernels of several callers take turns at the threads. Results
// do not depend on the number of threads. Ownership: memory and streams may outlive the device.
// Errors: OutOfMemoryError from allocate, reserve and grow_to.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "strata/base/thread_pool.h"
#include "strata/device/device.h"
#include "strata/memory/ledger.h"

namespace strata::device {

struct CpuDeviceOptions {
  std::shared_ptr<memory::Ledger> ledger = nullptr;  // null: the device makes its own
  int threads = 1;              // that share a kernel, the caller's included; >= 1
  std::vector<int> cores = {};  // that its own threads are bound to; empty: to none
  // The most memory that the device gives out; nullopt: all that the system has. Bounds the share
  // of one rank among many, and lets tests exhaust a device.
  std::optional<Bytes> memory_limit = std::nullopt;
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

  void copy(std::span<std::byte> target, std::span<const std::byte> source,
            Stream& stream) override;
  void fill_zero(std::span<std::byte> target, Stream& stream) override;
  void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
            Numel numel, Stream& stream) override;
  void accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                  DType source_dtype, Numel numel, Stream& stream) override;
  void scale(std::span<float> target, std::span<const float> source, float factor,
             Stream& stream) override;
  void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                    float scale, bool accumulate, Stream& stream) override;
  void store_remainder(const kernels::MasterRemainder& target, Numel first, const std::byte* source,
                       DType source_dtype, Numel numel, Stream& stream) override;
  void join_masters(std::span<float> masters, const std::byte* weights,
                    const kernels::MasterRemainder& remainder, Numel first,
                    Stream& stream) override;
  void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                     Stream& stream) override;
  void adam_step(const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars,
                 Stream& stream) override;
  std::vector<kernels::Fingerprint> fingerprints(std::span<const std::span<const std::byte>> runs,
                                                 Bytes piece, Stream& stream) override;
  std::vector<kernels::GradStats> grad_stats(std::span<const std::span<const float>> gradients,
                                             Stream& stream) override;
  void sums_of_squares(std::span<double> sums, std::span<const std::span<const float>> gradients,
                       Stream& stream) override;
  void gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                       double loss_scale, double clipping, Stream& stream) override;
  void write_flag(Flag& flag, std::uint32_t value, Stream& stream) override;
  void wait_flag(const Flag& flag, std::uint32_t value, Stream& stream) override;

 private:
  memory::ByteBudget::Hold take_part(Bytes bytes, std::string_view what);

  const std::shared_ptr<memory::Ledger> ledger_;
  const std::shared_ptr<HostWaits> waits_;
  const std::shared_ptr<memory::ByteBudget> budget_;  // null: none
  std::mutex pool_mutex_;                             // one loop at a time
  ThreadPool pool_;                                   // guarded by pool_mutex_
  const std::unique_ptr<Stream> compute_stream_;
};

}  // namespace strata::device
