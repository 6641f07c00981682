// CUDA devices. Every build has these calls; a build without a CUDA compiler has no devices. The
// driver need not be installed before a device is made.
//
// Memory comes from the driver (cudaMalloc for blocks, the virtual memory calls for growable
// memory), never from a framework's cache. Kernels are compiled for compute capability 8.0 and
// later.
// Threads, ownership, order: device.h. Errors: OutOfMemoryError; DeviceError if the driver refuses
// a call, with the call and the driver's own words.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "strata/device/device.h"

namespace strata::device {

struct CudaDeviceOptions {
  std::shared_ptr<memory::Ledger> ledger = nullptr;  // null: the device makes its own
  int index = 0;                                     // among the devices that this process sees
  // The CUstream on which the model computes in the calling thread; null: the default stream.
  std::function<void*()> compute_stream = nullptr;
  // The device calls it when the driver has too little memory, before the allocation fails. It
  // frees device memory that other code of this process caches (torch's allocator). It runs in the
  // thread that allocates. Null: there is no such cache.
  std::function<void()> release_unused = nullptr;
  std::shared_ptr<HostWaits> waits = nullptr;  // null: the device makes its own
};

// Whether this build has the CUDA device at all.
bool cuda_is_built();
// Devices that this process can use: 0 without a driver, and in a build without CUDA.
int cuda_device_count();
// The driver's answers about all devices, for reports. It makes no context, and throws nothing.
struct CudaFacts {
  struct Gpu {
    std::string name;
    std::array<int, 2> capability{};
    Bytes memory;
    std::vector<int> peers;  // the devices whose memory this one reaches
  };
  int toolkit = 0;      // the CUDA that compiled the kernels, 13000 for 13.0; 0: a build without
  int driver = 0;       // the newest CUDA that the driver serves; 0: no driver
  std::string absence;  // why there is no driver or no device, or what the driver refused to tell
  std::vector<Gpu> gpus;
};
CudaFacts cuda_facts();
// UsageError if there is no such device. It says which one is missing: CUDA in the build, the
// driver, or the index.
std::unique_ptr<Device> make_cuda_device(const CudaDeviceOptions& options);

}  // namespace strata::device
