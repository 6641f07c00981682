// The kernels of cuda_kernels.cu. Ownership: borrows the module.
// Threads: calls from any thread; work goes to the stream that is given. Memory: of the device, or
// pinned. Errors: UsageError for element types that a kernel does not have; DeviceError.
#pragma once

#include <array>
#include <memory>
#include <span>

#include "strata/device/cuda_driver.h"
#include "strata/kernels/adam.h"
#include "strata/kernels/grad_stats.h"

namespace strata::device {

class CudaKernels {
 public:
  explicit CudaKernels(const CudaModule& module);

  void cast(std::byte* target, DType target_dtype, const std::byte* source, DType source_dtype,
            Numel numel, CUstream stream) const;
  void accumulate(std::byte* target, DType target_dtype, const std::byte* source,
                  DType source_dtype, Numel numel, CUstream stream) const;
  void scale(std::span<float> target, std::span<const float> source, float factor,
             CUstream stream) const;
  // By processors: copy engines have links to serve, and copies of the model. False: not aligned to
  // 16 bytes, nothing was done.
  bool copy(std::span<std::byte> target, std::span<const std::byte> source, CUstream stream) const;
  void sum_in_order(std::span<float> target, std::span<const std::byte* const> sources, DType dtype,
                    float scale, bool accumulate, CUstream stream) const;
  // sums[i] = sum of squares of arrays[i]; `chunks` has room for chunks_of(arrays) doubles. Device
  // memory all.
  void sums_of_squares(double* sums, double* chunks, std::span<const std::span<const float>> arrays,
                       CUstream stream) const;
  void gradient_factor(kernels::GradientFactor& result, std::span<const double> sums,
                       double loss_scale, double clipping, CUstream stream) const;
  // Adds each piece's fingerprint to `sums`, which holds zeroes.
  void fingerprints(std::byte* sums, std::span<const std::byte> bytes, Bytes piece,
                    CUstream stream) const;
  static std::int64_t chunks_of(std::span<const std::span<const float>> arrays);

  // The update and its masters: cuda_adam.cuh.
  void adam(const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars,
            CUstream stream) const;
  void store_remainder(const kernels::MasterRemainder& target, Numel first, const std::byte* source,
                       DType source_dtype, Numel numel, CUstream stream) const;
  void join_masters(std::span<float> masters, const std::byte* weights,
                    const kernels::MasterRemainder& remainder, Numel first, CUstream stream) const;
  void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                     CUstream stream) const;

 private:
  using ByTypes = std::array<std::array<CUfunction, kKernelTypes>, kKernelTypes>;

  const CudaModule& module_;
  ByTypes cast_{};
  ByTypes accumulate_{};  // null where fp64 takes part
  std::array<CUfunction, kKernelTypes> sum_in_order_{};
  CUfunction scale_ = nullptr;
  CUfunction copy_ = nullptr;
  CUfunction chunk_sums_ = nullptr;
  CUfunction totals_ = nullptr;
  CUfunction gradient_factor_ = nullptr;
  CUfunction fingerprints_ = nullptr;
  std::array<CUfunction, kKernelTypes> adam_{};
  std::array<CUfunction, kKernelTypes> remainder_{};
  std::array<CUfunction, kKernelTypes> adopt_{};
  CUfunction adam_remainder_ = nullptr;
  CUfunction join_masters_ = nullptr;
  CUfunction adam_rounded_ = nullptr;
  CUfunction adam_rounded16_ = nullptr;  // with bf16 moments
};

}  // namespace strata::device
