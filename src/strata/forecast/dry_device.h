// A device that computes nothing: memory is address space without pages, kernels and copies return
// at once, and the ledger counts as on any other device. Every read of a value finds zero. Threads,
// ownership: as CpuDevice. Errors: OutOfMemoryError if the system has no more address space.
#pragma once

#include "strata/device/cpu_device.h"

namespace strata::forecast {

class DryDevice final : public device::CpuDevice {
 public:
  // `runs_ahead`: as the device does that this one stands for.
  explicit DryDevice(bool runs_ahead) : runs_ahead_(runs_ahead) {}

  std::string_view name() const override { return "dry"; }
  bool runs_ahead() const override { return runs_ahead_; }

  void copy(std::span<std::byte>, std::span<const std::byte>, device::Stream&) override {}
  void fill_zero(std::span<std::byte>, device::Stream&) override {}
  void cast(std::byte*, DType, const std::byte*, DType, Numel, device::Stream&) override {}
  void accumulate(std::byte*, DType, const std::byte*, DType, Numel, device::Stream&) override {}
  void scale(std::span<float>, std::span<const float>, float, device::Stream&) override {}
  void sum_in_order(std::span<float>, std::span<const std::byte* const>, DType, float, bool,
                    device::Stream&) override {}
  void store_remainder(const kernels::MasterRemainder&, Numel, const std::byte*, DType, Numel,
                       device::Stream&) override {}
  void join_masters(std::span<float>, const std::byte*, const kernels::MasterRemainder&, Numel,
                    device::Stream&) override {}
  void adopt_written(std::span<float>, const std::byte*, DType, device::Stream&) override {}
  void adam_step(const kernels::AdamSpans&, const kernels::AdamScalars&, device::Stream&) override {
  }
  std::vector<kernels::Fingerprint> fingerprints(std::span<const std::span<const std::byte>> runs,
                                                 Bytes piece, device::Stream&) override;
  std::vector<kernels::GradStats> grad_stats(std::span<const std::span<const float>> gradients,
                                             device::Stream&) override;
  void sums_of_squares(std::span<double>, std::span<const std::span<const float>>,
                       device::Stream&) override {}
  void gradient_factor(kernels::GradientFactor&, std::span<const double>, double, double,
                       device::Stream&) override {}
  void write_flag(device::Flag&, std::uint32_t, device::Stream&) override {}
  void wait_flag(const device::Flag&, std::uint32_t, device::Stream&) override {}

 private:
  bool runs_ahead_;
};

}  // namespace strata::forecast
