// The compiled kernels, loaded into one device's context: finds them by name and launches them.
// Threads: calls from any thread; work goes to the stream that is given. Errors: UsageError for
// element types that a kernel does not have; DeviceError.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "strata/base/dtype.h"
#include "strata/device/cuda_driver.h"

namespace strata::device {

// Types of elements that kernels know, by their places in tables: fp64, fp32, fp16, bf16.
inline constexpr std::size_t kKernelTypes = 4;
inline constexpr std::array<const char*, kKernelTypes> kKernelSuffixes = {"f64", "f32", "f16",
                                                                          "bf16"};
// kKernelTypes where there is none.
std::size_t kernel_place_of(DType dtype);
// `first`: the place of the first type that the operation has.
void require_kernel_types(const char* operation, std::size_t first, DType target, DType source);

class CudaModule {
 public:
  static constexpr unsigned kThreads = 256;  // of a block

  explicit CudaModule(std::shared_ptr<const CudaContext> context);
  ~CudaModule();
  CudaModule(const CudaModule&) = delete;
  CudaModule& operator=(const CudaModule&) = delete;

  const CudaContext& context() const { return *context_; }
  // Enough to fill the device several times.
  unsigned blocks_max() const { return blocks_max_; }
  CUfunction find(const std::string& name) const;
  // `threads` of work; `arguments` are pointers to the kernel's parameters.
  void launch(CUfunction function, std::int64_t threads, void** arguments, CUstream stream,
              unsigned blocks_most = 0xFFFFFFFFU) const;

 private:
  std::shared_ptr<const CudaContext> context_;
  CUmodule module_ = nullptr;
  unsigned blocks_max_ = 0;
};

}  // namespace strata::device
