// The CUDA device in a build that found no CUDA compiler.
#include "strata/base/error.h"
#include "strata/device/cuda_device.h"

namespace strata::device {

bool cuda_is_built() {
  return false;
}

int cuda_device_count() {
  return 0;
}

CudaFacts cuda_facts() {
  return {0, 0, "this build of Strata has no CUDA device", {}};
}

std::unique_ptr<Device> make_cuda_device(const CudaDeviceOptions& /*options*/) {
  throw UsageError(
      "this build of Strata has no CUDA device, because no CUDA compiler (nvcc) was found when it "
      "was made; build it with one, or train on the CPU");
}

}  // namespace strata::device
