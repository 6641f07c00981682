#include "strata/torch/base/placement.h"

#include <ATen/Context.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "strata/base/error.h"
#include "strata/device/cpu_device.h"
#include "strata/device/cuda_device.h"
#include "strata/torch/base/host_threads.h"

namespace strata::torch {
namespace {

int gpus_of_torch() {
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
}

std::string describe_gpus() {
  return fmt::format("torch sees {} GPUs, {}", gpus_of_torch(),
                     device::cuda_is_built()
                         ? fmt::format("Strata {}", device::cuda_device_count())
                         : std::string("this build of Strata has no CUDA device"));
}

c10::Device gpu_of_rank(int local_rank) {
  const int count = usable_gpus();
  if (count == 1) return {c10::DeviceType::CUDA, 0};  // launchers may show each rank its own alone
  if (local_rank >= 0 && local_rank < count)
    return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(local_rank)};
  throw ConfigError(fmt::format(
      "strata.device: every rank of a host needs a GPU of its own; start fewer ranks a host, or "
      "write \"cpu\"; found LOCAL_RANK {} and {} GPUs",
      local_rank, count));
}

}  // namespace

std::optional<c10::Device> device_of(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  std::optional<c10::Device> found;
  std::string first;
  for (const auto& [name, tensor] : parameters) {
    const c10::Device device = tensor.device();
    if (device.is_meta()) {
      throw ConfigError(fmt::format(
          "a model that was built without values (on the meta device) cannot be initialized; use "
          "strata.load_pretrained, or give its parameters values first; found '{}'",
          name));
    }
    if (!device.is_cpu() && !device.is_cuda()) {
      throw ConfigError(
          fmt::format("parameters must be on the CPU or on a CUDA device; found '{}' on {}", name,
                      device.str()));
    }
    if (found && *found != device) {
      throw ConfigError(fmt::format(
          "all parameters of a model must be on one device; move it there with model.to(device); "
          "found '{}' on {} and '{}' on {}",
          first, found->str(), name, device.str()));
    }
    if (!found) first = name;
    found = device;
  }
  return found;
}

int usable_gpus() {
  if (!device::cuda_is_built()) return 0;
  const int torch = gpus_of_torch();
  return torch == 0 ? 0 : std::min(torch, device::cuda_device_count());
}

c10::Device choose_device(engine::DeviceKind wanted, std::optional<c10::Device> present,
                          int local_rank) {
  const c10::Device host(c10::DeviceType::CPU);
  const bool on_gpu = present && present->is_cuda();
  if (wanted == engine::DeviceKind::kCpu) return host;
  if (wanted == engine::DeviceKind::kAuto && !on_gpu && usable_gpus() == 0) return host;
  if (usable_gpus() == 0) {
    throw ConfigError(fmt::format(
        "strata.device: no GPU can be used here; write \"cpu\", or make the GPU visible to a build "
        "with CUDA; {}, and {}",
        on_gpu ? fmt::format("the model is on {}", present->str()) : "\"cuda\" is asked for",
        describe_gpus()));
  }
  return on_gpu ? *present : gpu_of_rank(local_rank);
}

std::shared_ptr<device::Device> make_device(c10::Device place, int threads,
                                            std::shared_ptr<device::HostWaits> waits) {
  if (!place.is_cuda()) {
    device::CpuDeviceOptions options;
    options.threads = threads;
    options.cores = host_cores(threads);
    options.waits = std::move(waits);
    return std::make_shared<device::CpuDevice>(options);
  }
  device::CudaDeviceOptions options;
  options.index = place.index();
  options.waits = std::move(waits);
  options.compute_stream = [place] { return current_stream(place).native_handle(); };
  options.release_unused = [place] { release_cached_memory(place); };
  std::shared_ptr<device::Device> device = device::make_cuda_device(options);
  // torch's Python layer would do this later, with the interpreter's lock held.
  at::globalContext().lazyInitDevice(place.type());
  return device;
}

c10::Stream current_stream(c10::Device place) {
  return c10::impl::VirtualGuardImpl(place.type()).getStream(place);
}

at::Tensor tensor_over(const void* memory, std::int64_t numel, c10::ScalarType type,
                       c10::Device place) {
  // Many functions of torch take mutable tensors although they only read them.
  const std::int64_t sizes[] = {numel};
  return at::for_blob(const_cast<void*>(memory), sizes)
      .options(at::TensorOptions().dtype(type).device(place))
      .target_device(place)
      .make_tensor();
}

void release_cached_memory(c10::Device place) {
  if (!place.is_cpu()) c10::getDeviceAllocator(place.type())->emptyCache();
}

}  // namespace strata::torch
