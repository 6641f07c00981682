// A CPU device that runs ahead: a stream runs its work some time after the call that queued it, in
// a thread of its own, so that only events order streams, as on a GPU. A missing wait_for() then
// shows without a GPU: as wrong values, and under a race detector as a race.
//
// It behaves as the CUDA device, and accepts the same memory: kernels reach memory of the device
// and pinned host memory; when a copy from or to ordinary host memory returns, it has read that
// memory, or is complete. New memory is not zero. Freeing memory does not wait: work that still
// uses the memory uses freed memory, which an address sanitizer shows. Threads, ownership:
// device.h; memory, streams and events may outlive the device. Errors: DeviceError from calls whose
// kernel would reach ordinary host memory; work that throws ends the program.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "device/late_stream.h"
#include "strata/device/cpu_device.h"

namespace strata::device {

class LateDevice : public CpuDevice {
 public:
  // `seed`: of the pace of its streams.
  explicit LateDevice(CpuDeviceOptions options = {}, std::uint64_t seed = 1);

  // Queues work of a test's own, as the model's kernels are. The test keeps the memory that the
  // work reaches. The objects that it owns must not show the host that it has run, as a count of
  // owners would.
  void enqueue(Stream& stream, std::function<void()> work);

  bool runs_ahead() const override { return true; }
  Bytes free_bytes() const override { return free.value_or(CpuDevice::free_bytes()); }
  std::optional<Bytes> free;  // what free_bytes() tells; absent: the host's
  std::unique_ptr<Memory> allocate(Bytes bytes, memory::Kind kind) override;
  std::unique_ptr<Memory> allocate_uncharged(Bytes bytes) override;
  std::unique_ptr<HostMemory> allocate_host(Bytes bytes, memory::Kind kind) override;
  std::unique_ptr<GrowableMemory> reserve(Bytes bytes, memory::Kind kind) override;
  std::unique_ptr<GrowableMemory> reserve_shared(Bytes bytes, memory::Kind kind) override;
  std::unique_ptr<PeerMapping> reserve_mapping(Bytes bytes) override;
  std::unique_ptr<HostRegistration> pin(std::span<std::byte> host) override;
  bool host_accessible(const std::byte* pointer) const override;
  bool device_accessible(const std::byte* pointer) const override;
  std::unique_ptr<Stream> create_stream() override;
  Stream& compute_stream() override { return *compute_stream_; }

  void copy(std::span<std::byte> target, std::span<const std::byte> source,
            Stream& stream) override;
  void fill_zero(std::span<std::byte> target, Stream& stream) override;
  void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
            Numel numel, Stream& stream) override;
  void accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                  DType source_dtype, Numel numel, Stream& stream) override;
  void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                    float scale, bool accumulate, Stream& stream) override;
  void store_remainder(const kernels::MasterRemainder& target, Numel first, const std::byte* source,
                       DType source_dtype, Numel numel, Stream& stream) override;
  void join_masters(std::span<float> masters, const std::byte* weights,
                    const kernels::MasterRemainder& remainder, Numel first,
                    Stream& stream) override;
  void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                     Stream& stream) override;
  void update_step(const kernels::UpdateSpans& spans, const kernels::UpdateScalars& scalars,
                   Stream& stream) override;
  std::vector<kernels::Fingerprint> fingerprints(std::span<const std::span<const std::byte>> runs,
                                                 Bytes piece, Stream& stream) override;
  void sums_of_squares(std::span<double> sums, std::span<const std::span<const float>> gradients,
                       Stream& stream) override;
  void gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                       double loss_scale, double clipping, Stream& stream) override;
  void write_flag(Flag& flag, std::uint32_t value, Stream& stream) override;
  void wait_flag(const Flag& flag, std::uint32_t value, Stream& stream) override;

 protected:
  const std::shared_ptr<LateChip>& chip() const { return chip_; }  // for streams of other classes

 private:
  const std::shared_ptr<LateChip> chip_;
  const std::unique_ptr<Stream> compute_stream_;
};

}  // namespace strata::device
