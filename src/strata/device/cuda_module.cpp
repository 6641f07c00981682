#include "strata/device/cuda_module.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>

#include "strata/base/error.h"

// The fat binary, placed into the library by cuda_fatbin.cpp.
extern "C" const unsigned char strata_cuda_fatbin[];

namespace strata::device {
namespace {

constexpr unsigned kBlocksPerProcessor = 32;

}  // namespace

std::size_t kernel_place_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0;
    case DType::kFloat32:
      return 1;
    case DType::kFloat16:
      return 2;
    case DType::kBFloat16:
      return 3;
    default:
      return kKernelSuffixes.size();
  }
}

void require_kernel_types(const char* operation, std::size_t first, DType target, DType source) {
  for (const DType dtype : {target, source}) {
    const std::size_t place = kernel_place_of(dtype);
    if (place >= first && place < kKernelSuffixes.size()) continue;
    throw UsageError(
        fmt::format("{} is defined for {}float32, float16 and bfloat16; cast other "
                    "tensors before; found: {}",
                    operation, first == 0 ? "float64, " : "", name_of(dtype)));
  }
}

CudaModule::CudaModule(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  const CUresult loaded = cuda.ModuleLoadData(&module_, strata_cuda_fatbin);
  if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) {
    throw DeviceError(fmt::format(
        "cuda:{} cannot run Strata's kernels, which need compute capability 8.0 or later; it has "
        "{}.{}",
        context_->index(), context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        context_->attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)));
  }
  cuda.check(loaded, "cuModuleLoadData");
  const int processors = context_->attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  blocks_max_ = static_cast<unsigned>(processors) * kBlocksPerProcessor;
}

CudaModule::~CudaModule() {
  const CudaContext::Scope scope(*context_, std::nothrow);
  context_->driver().ModuleUnload(module_);
}

CUfunction CudaModule::find(const std::string& name) const {
  CUfunction function = nullptr;
  context_->driver().check(context_->driver().ModuleGetFunction(&function, module_, name.c_str()),
                           name);
  return function;
}

void CudaModule::launch(CUfunction function, std::int64_t threads, void** arguments,
                        CUstream stream, unsigned blocks_most) const {
  const auto wanted = static_cast<std::uint64_t>((threads + kThreads - 1) / kThreads);
  const auto blocks =
      static_cast<unsigned>(std::min<std::uint64_t>(wanted, std::min(blocks_max_, blocks_most)));
  const CudaContext::Scope scope(*context_);
  const CudaDriver& cuda = context_->driver();
  cuda.check(
      cuda.LaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
      "cuLaunchKernel");
}

}  // namespace strata::device
