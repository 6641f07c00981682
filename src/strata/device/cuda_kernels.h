// The kernels of cuda_kernels.cu but for those of the update. Ownership: borrows the module.
// Threads: calls from any thread; work goes to the stream that is given. Memory: of the device, or
// pinned. Errors: UsageError for element types that a kernel does not have; DeviceError.
#pragma once

#include <array>
#include <memory>

#include "strata/device/cuda_module.h"
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
};

}  // namespace strata::device
