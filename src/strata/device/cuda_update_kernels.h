// The kernels of the update and of its masters: cuda_adam.cuh. Threads, memory, errors: as
// CudaKernels. Ownership: borrows the module.
#pragma once

#include <array>
#include <span>

#include "strata/device/cuda_module.h"
#include "strata/kernels/adam.h"

namespace strata::device {

class CudaUpdateKernels {
 public:
  explicit CudaUpdateKernels(const CudaModule& module);

  void adam(const kernels::AdamSpans& spans, const kernels::AdamScalars& scalars,
            CUstream stream) const;
  void store_remainder(const kernels::MasterRemainder& target, Numel first, const std::byte* source,
                       DType source_dtype, Numel numel, CUstream stream) const;
  void join_masters(std::span<float> masters, const std::byte* weights,
                    const kernels::MasterRemainder& remainder, Numel first, CUstream stream) const;
  void adopt_written(std::span<float> masters, const std::byte* weights, DType dtype,
                     CUstream stream) const;

 private:
  const CudaModule& module_;
  std::array<CUfunction, kKernelTypes> adam_{};
  std::array<CUfunction, kKernelTypes> remainder_{};
  std::array<CUfunction, kKernelTypes> adopt_{};
  CUfunction adam_remainder_ = nullptr;
  CUfunction join_masters_ = nullptr;
  CUfunction adam_rounded_ = nullptr;
  CUfunction adam_rounded16_ = nullptr;  // with bf16 moments
};

}  // namespace strata::device
